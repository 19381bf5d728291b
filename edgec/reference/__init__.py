"""The reference: an LLM engine in plain PyTorch, written apart from the C++ runtime, to hold it against.

options         what an engine can be told
sequence        one answer in the making: its tokens and its blocks
block_manager   which block of the KV pool belongs to whom; prefixes that are shared
scheduler       who runs in the next step, with how many tokens
attention       attention over blocks
model_runner    one pass of the model over a packed batch
quantised       INT8 activations, keys and values, as rounding
philox, sampler random numbers, and from logits to a token
text            tokens to text as they come, stop strings
engine          requests in, events out
"""
