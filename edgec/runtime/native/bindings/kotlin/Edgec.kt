/** Thin Kotlin over the C ABI; its other half is edgec_jni.c. One thread at a time may use an engine. */
package dev.edgec

/** What the runtime refused, and why. `status` is one of EDGEC_* in edgec.h. */
class EdgecException(val status: Int, message: String) : Exception(message)

/** One thing that happened: new text, or the end (`finish` is not 0). */
class EdgecEvent(val request: Long, val sequence: Int, val token: Int, val finish: Int, val text: String)

class Edgec(bundle: String, threads: Int = 0, memoryBudget: Long = 0) : AutoCloseable {
    private var handle: Long = create(bundle, threads, memoryBudget)

    /** Queue a prompt; gives the request's number. */
    fun submit(prompt: String, maxTokens: Int = 256, temperature: Float = 0f, seed: Long = 0, special: Boolean = false): Long =
        submit(open(), prompt, maxTokens, temperature, seed, special)

    fun cancel(request: Long) = cancel(open(), request)

    /** Run one iteration; false when there was nothing to do. Call it from a background thread until the answer ends. */
    fun step(): Boolean = step(open()) != 0

    /** What has happened since the last call. */
    fun poll(): Array<EdgecEvent> = poll(open())

    /** Call from onTrimMemory: 0 forgets cached prefixes, 1 also gives pages back, 2 also stops all but one request. */
    fun trim(level: Int) = trim(open(), level)

    /** An answer as it comes. Stops the request when the consumer throws. */
    inline fun generate(prompt: String, maxTokens: Int = 256, temperature: Float = 0f, onText: (String) -> Unit) {
        val request = submit(prompt, maxTokens, temperature)
        var finished = false
        try {
            while (!finished) {
                step()
                for (event in poll()) {
                    if (event.request != request) continue
                    if (event.text.isNotEmpty()) onText(event.text)
                    finished = finished || event.finish != 0
                }
            }
        } finally {
            if (!finished) cancel(request)
        }
    }

    override fun close() {
        if (handle != 0L) destroy(handle)
        handle = 0
    }

    private fun open(): Long {
        check(handle != 0L) { "the engine is closed" }
        return handle
    }

    private companion object {
        init {
            System.loadLibrary("edgec_jni")
        }

        @JvmStatic external fun create(bundle: String, threads: Int, memoryBudget: Long): Long
        @JvmStatic external fun destroy(handle: Long)
        @JvmStatic external fun submit(handle: Long, prompt: String, maxTokens: Int, temperature: Float, seed: Long, special: Boolean): Long
        @JvmStatic external fun cancel(handle: Long, request: Long)
        @JvmStatic external fun step(handle: Long): Int
        @JvmStatic external fun poll(handle: Long): Array<EdgecEvent>
        @JvmStatic external fun trim(handle: Long, level: Int)
    }
}
