// Thin Swift over the C ABI. One thread at a time may use an engine; `generate` steps on the caller's.
import CEdgec

/// What the runtime refused, and why. `status` is one of EDGEC_* in edgec.h.
public struct EdgecError: Error, CustomStringConvertible {
  public let status: Int32
  public let description: String
}

public final class Edgec {
  private let handle: OpaquePointer

  /// Opens a bundle's `native` folder. Zero means the default.
  public init(bundle: String, threads: Int32 = 0, memoryBudget: UInt64 = 0) throws {
    guard edgec_abi_version() == UInt32(EDGEC_ABI_VERSION) else {
      throw EdgecError(status: Int32(EDGEC_VERSION_MISMATCH), description: "compiled for another version of the library")
    }
    var options = edgec_engine_options()
    options.struct_size = UInt32(MemoryLayout<edgec_engine_options>.size)
    options.threads = threads
    options.memory_budget = memoryBudget
    var made: OpaquePointer?
    try Edgec.check(edgec_engine_create(bundle, &options, &made))
    handle = made!
  }

  deinit { edgec_engine_destroy(handle) }

  /// Queues a prompt; gives the request's number. Special tokens in it count only with `special`.
  public func submit(
    _ prompt: String, maxTokens: Int32 = 256, temperature: Float = 0, seed: UInt64? = nil, special: Bool = false
  ) throws -> UInt64 {
    let text = Array(prompt.utf8CString.dropLast())
    var tokens = [Int32](repeating: 0, count: text.count + 1)
    var count: Int32 = 0
    try Edgec.check(
      edgec_tokenizer_encode(
        edgec_engine_tokenizer(handle), text, text.count, special ? 1 : 0, &tokens, Int32(tokens.count), &count))
    var request = edgec_request()
    request.struct_size = UInt32(MemoryLayout<edgec_request>.size)
    request.token_count = count
    request.sampling.struct_size = UInt32(MemoryLayout<edgec_sampling>.size)
    request.sampling.max_tokens = maxTokens
    request.sampling.temperature = temperature
    request.sampling.top_p = 1
    request.sampling.repetition_penalty = 1
    request.sampling.logprobs = -1
    request.sampling.n = 1
    request.sampling.seed = seed ?? 0
    request.sampling.has_seed = seed == nil ? 0 : 1
    var id: UInt64 = 0
    try tokens.withUnsafeBufferPointer { pointer in
      request.tokens = pointer.baseAddress
      try Edgec.check(edgec_engine_submit(handle, &request, &id))
    }
    return id
  }

  public func cancel(_ request: UInt64) { _ = edgec_engine_cancel(handle, request) }

  /// Gives memory back: 0 forgets cached prefixes, 1 also pages, 2 also stops all but one request.
  public func trim(_ level: Int32) throws { try Edgec.check(edgec_engine_trim(handle, level)) }

  /// Streams an answer. Return false from `onText` to stop.
  public func generate(
    _ prompt: String, maxTokens: Int32 = 256, temperature: Float = 0, onText: (String) -> Bool
  ) throws {
    let request = try submit(prompt, maxTokens: maxTokens, temperature: temperature)
    var events = [edgec_event](repeating: edgec_event(), count: 16)
    while true {
      var outcome: Int32 = 0
      var count: Int32 = 0
      try Edgec.check(edgec_engine_step(handle, &outcome))
      try Edgec.check(edgec_engine_poll(handle, &events, 16, &count))
      for event in events.prefix(Int(count)) where event.request == request {
        if event.text_bytes > 0 {
          let bytes = UnsafeRawBufferPointer(start: event.text, count: Int(event.text_bytes))
          if !onText(String(decoding: bytes, as: UTF8.self)) {
            cancel(request)
            return
          }
        }
        if event.kind == EDGEC_EVENT_FINISH { return }
      }
    }
  }

  private static func check(_ status: edgec_status) throws {
    if status != EDGEC_OK { throw EdgecError(status: status, description: String(cString: edgec_last_error())) }
  }
}
