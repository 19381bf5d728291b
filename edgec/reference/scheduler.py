"""Who runs in the next step, on which blocks. Holds no tensors and reads no clock.

A step is a transaction:

    step = scheduler.schedule()                       # plans, and gives out the blocks; None: nothing can run
    … copy the blocks of step.copies, run the model, sample …
    scheduler.commit(step, {sequence: [token, …], …})  # or, when the model failed, scheduler.finish(…) for all in it

**Order**, under a budget of `step_tokens`: running sequences that need one token; then prompts that are under way, in
chunks (Agrawal et al., "Sarathi-Serve", 2024); then waiting sequences, the greatest priority first and among equals the
first to come. When the first of them does not fit, nobody passes it.

**Preemption** is by recomputation. Running sequences stand in the same order, and one that lacks a block takes those of
the last. So the first is never a victim and gets on in each step, and whoever is first finishes: there is no livelock.

**Proposals** (speculation.py) follow a sequence's last token in its chunk, so that one pass gives logits after each of
them. They come last, in rows and blocks that nobody else wants in this step. `commit` keeps as many positions as there
are new tokens; the rejected tail's blocks go back, and what lies in its other slots is written over.

What the native scheduler does and this one does not: tenants and weighted fair queueing (`submit` refuses a weight
other than 1), aging (a request of low priority waits as long as greater ones keep coming), a controller that keeps to a
step time, static batching, and choosing victims by the work they lose. None of these changes anyone's tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from edgec.reference.block_manager import ROOT, BlockManager
from edgec.reference.sequence import Sequence, State


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence from position `start` on; `samples` when its last token is among them.

    The last `drafts` of them are proposed ones, which stand behind its last token.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: int = 0

    @property
    def samples(self) -> bool:
        return self.start + self.count - self.drafts == len(self.sequence.tokens)


@dataclass(frozen=True)
class Copy:
    """Contents of a block that a sequence shared, for the one that it has to itself now."""

    sequence: Sequence
    source: int
    target: int


@dataclass
class Step:
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)  # to be done before anything is written, all reads first
    slots: int = 0  # sequences that the step could have held


@dataclass
class Counters:
    """Since the engine was opened; the names are those of `edgec.runtime.stats.Stats`."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    batch_slots: int = 0
    batch_used: int = 0
    kv_token_steps: int = 0
    kv_slot_steps: int = 0


class Scheduler:
    def __init__(self, manager: BlockManager, *, max_batch: int, step_tokens: int, prefix_cache: bool = True) -> None:
        self.manager = manager
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []  # both in the order of `Sequence.order`
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._tickets = 0

    # ---- Sequences

    def add(self, sequence: Sequence) -> None:
        """Queue it. The caller has made sure that `max_total` positions fit the empty pool."""
        sequence.ticket = self._tickets
        self._tickets += 1
        bisect.insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """Take it out, in any state, also between `schedule` and `commit`; its blocks are back at once."""
        if sequence.state is State.FINISHED:
            return
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self._drop_blocks(sequence)
        sequence.state = State.FINISHED

    def forget(self, sequence: Sequence) -> None:
        """Let nobody find what is in its blocks: its keys and values are broken."""
        for number in sequence.table:
            self.manager.forget(number)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has the parent's tokens but the last, run on the parent's blocks."""
        child.table, child.computed, child.most = list(parent.table), parent.computed, parent.most
        child.published, child.parent, child.cached = parent.published, parent.parent, parent.cached
        for number in child.table:
            self.manager.retain(number)
        child.ticket = self._tickets
        self._tickets += 1
        child.state = State.RUNNING
        bisect.insort(self.running, child, key=_order)

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting, at its old place; its tokens stay, its keys and values are computed again."""
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_order)
        self.counters.preemptions += 1

    def _drop_blocks(self, sequence: Sequence) -> None:
        # The tail first: cached prefixes give way in this order, and a prefix is useful without its tail only.
        for number in reversed(sequence.table):
            self.manager.release(number)
        sequence.table = []
        sequence.computed = sequence.published = 0
        sequence.parent = ROOT

    # ---- A step

    def schedule(self, proposed: Mapping[Sequence, int] | None = None) -> Step | None:
        """The next step, with blocks for every position in it; None when nobody can run.

        Args:
            proposed: how many tokens have been proposed for whom.
        """
        step = Step(slots=min(self.max_batch, len(self.running) + len(self.waiting)))
        budget = self.step_tokens
        decodes = [s for s in self.running if s.pending == 1]
        prompts = [s for s in self.running if s.pending > 1]
        for sequence in [*decodes, *prompts]:
            if sequence.state is not State.RUNNING or not budget:  # a victim of one before it
                continue
            count = min(sequence.pending, budget)
            if self._reserve(sequence, count, step):
                step.chunks.append(Chunk(sequence, sequence.computed, count))
                budget -= count
        # A victim may have been planned before the one that took its blocks.
        step.chunks = [c for c in step.chunks if c.sequence.state is State.RUNNING]
        step.copies = [c for c in step.copies if c.sequence.state is State.RUNNING]
        budget = self.step_tokens - sum(c.count for c in step.chunks)
        while self.waiting and budget:
            chunk = self._start(self.waiting[0], budget, step)
            if chunk is None:
                break
            step.chunks.append(chunk)
            budget -= chunk.count
        self._add_drafts(step, proposed or {})
        return step if step.chunks else None

    def _add_drafts(self, step: Step, proposed: Mapping[Sequence, int]) -> None:
        """Let sequences that decode take along as many of their proposals as rows and blocks are left for."""
        manager, size = self.manager, self.manager.block_size
        rows = self.step_tokens - sum(c.count for c in step.chunks)
        promised = self._promised()
        for place, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            if chunk.count != 1 or not chunk.samples:
                continue
            spare = max(manager.available - promised, 0)
            slots = (len(sequence.table) + spare) * size - len(sequence.tokens)
            count = min(proposed.get(sequence, 0), sequence.room - 1, rows, slots)
            if count < 1:
                continue
            lacking = -(-(len(sequence.tokens) + count) // size) - len(sequence.table)
            sequence.table.extend(manager.allocate() for _ in range(lacking))
            step.chunks[place] = Chunk(sequence, chunk.start, 1 + count, count)
            rows -= count

    def _promised(self) -> int:
        """Blocks that prompts under way still want."""
        return sum(max(-(-len(s.tokens) // self.manager.block_size) - len(s.table), 0) for s in self.running)

    def _reserve(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Blocks for `count` more positions, at the cost of sequences behind this one, or of itself."""
        manager, size = self.manager, self.manager.block_size
        while True:
            shared = self._shared_tail(sequence)
            lacking = -(-(sequence.computed + count) // size) - len(sequence.table)
            if lacking + shared <= manager.available:
                break
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        if shared:
            place = sequence.computed // size
            old = sequence.table[place]
            new = manager.make_writable(old)
            sequence.table[place] = new
            manager.set_filled(new, sequence.computed % size)
            step.copies.append(Copy(sequence, old, new))
        sequence.table.extend(manager.allocate() for _ in range(lacking))
        return True

    def _shared_tail(self, sequence: Sequence) -> bool:
        """Whether the block that its next position goes to has other owners: it is copied before it is written."""
        if sequence.computed % self.manager.block_size == 0:
            return False
        return self.manager.owners(sequence.table[sequence.computed // self.manager.block_size]) > 1

    def _start(self, sequence: Sequence, budget: int, step: Step) -> Chunk | None:
        """Give a waiting sequence its first blocks: cached ones, and new ones. None when it does not fit now."""
        manager, size = self.manager, self.manager.block_size
        if sum(s.places for s in self.running) + sequence.places > self.max_batch:
            return None
        hits = manager.find_prefix(sequence.tokens, sequence.salt, self._cacheable_blocks(sequence))
        revived = sum(not manager.owners(number) for number in hits)
        whole = -(-len(sequence.tokens) // size) - len(hits)
        promised = self._promised() + len(self.running)  # and one for each running sequence to grow into
        if revived + whole + (promised if self.running else 0) > manager.available:
            return None
        self.waiting.pop(0)
        sequence.state = State.RUNNING
        bisect.insort(self.running, sequence, key=_order)
        for number in hits:
            manager.retain(number)
        sequence.table = list(hits)
        sequence.computed = len(hits) * size
        sequence.published = len(hits)
        sequence.parent = manager.blocks[hits[-1]].serial if hits else ROOT
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.counters.prompt_tokens += sequence.prompt
            self.counters.cached_tokens += sequence.computed
        count = min(sequence.pending, budget)
        reserved = self._reserve(sequence, count, step)
        assert reserved, "a sequence was started without the blocks for it"
        return Chunk(sequence, sequence.computed, count)

    def _cacheable_blocks(self, sequence: Sequence) -> int:
        """The last token is always computed, because its logits are wanted; with `compute_all`, what never was, too."""
        if not self.prefix_cache:
            return 0
        tokens = len(sequence.tokens) - 1
        if sequence.compute_all:
            tokens = min(tokens, sequence.most)
        return tokens // self.manager.block_size

    def commit(self, step: Step, tokens: Mapping[Sequence, SequenceOf[int]]) -> None:
        """Note what was computed, and append the new tokens. What was finished meanwhile is passed over.

        Args:
            tokens: of a chunk with drafts those of its proposals that were kept, and the one after them.
        """
        counters, size = self.counters, self.manager.block_size
        for chunk in step.chunks:
            sequence = chunk.sequence
            counters.computed_tokens += chunk.count
            if sequence.state is not State.RUNNING:
                continue
            new = tokens.get(sequence, ())
            own = chunk.count - chunk.drafts
            counters.recomputed_tokens += min(max(sequence.most - chunk.start, 0), own)
            sequence.computed = chunk.start + own + (max(len(new) - 1, 0) if chunk.drafts else 0)
            sequence.most = max(sequence.most, sequence.computed)
            while (len(sequence.table) - 1) * size >= sequence.computed:  # of rejected proposals
                self.manager.release(sequence.table.pop())
            for place in range(chunk.start // size, len(sequence.table)):
                self.manager.set_filled(sequence.table[place], min(size, sequence.computed - place * size))
            sequence.tokens.extend(new)
            counters.answer_tokens += len(new)
            self._publish(sequence)
        counters.steps += 1
        counters.batch_slots += step.slots
        counters.batch_used += len(step.chunks)
        counters.kv_token_steps += self.manager.owned_tokens
        counters.kv_slot_steps += self.manager.owned * size

    def _publish(self, sequence: Sequence) -> None:
        size = self.manager.block_size
        while self.prefix_cache and (sequence.published + 1) * size <= sequence.computed:
            place = sequence.published
            sequence.table[place], sequence.parent = self.manager.publish(
                sequence.table[place],
                sequence.parent,
                sequence.salt,
                sequence.tokens[place * size : (place + 1) * size],
            )
            sequence.published += 1

    def check(self) -> None:
        """Raises AssertionError with what does not fit together."""
        size = self.manager.block_size
        self.manager.check(s.table for s in self.running)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        for sequence in self.waiting:
            assert sequence.state is State.WAITING, "a sequence that does not wait is in the queue"
            assert not sequence.table and not sequence.computed, "a waiting sequence holds blocks"
        for sequence in self.running:
            assert sequence.state is State.RUNNING, "a sequence runs that does not know it"
            assert sequence.pending >= 1, "a running sequence has nothing to compute"
            assert len(sequence.tokens) <= sequence.max_total, "a sequence is too long"
            assert len(sequence.table) >= -(-sequence.computed // size), "a sequence lacks a block"
            assert sequence.published * size <= sequence.computed, "a block was published before it was full"


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
