package io.penstock.example

import io.grpc.StatusException
import io.penstock.inference.v1.InferenceServiceGrpcKt.InferenceServiceCoroutineStub
import java.util.Locale
import kotlin.time.DurationUnit
import kotlin.time.TimeSource
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.launch

/** Makes many calls over one channel, several at the same time, and counts them. All run on one thread, without locks. */
internal class Load(private val line: CommandLine) {
    private val request = line.generate(line.prompts.single())
    private val start = TimeSource.Monotonic.markNow()
    private var begun = 0L
    private var calls = 0L
    private var failed = 0L
    private var messages = 0L

    /** Makes the calls, and returns whether every call succeeded. */
    suspend fun run(stub: InferenceServiceCoroutineStub): Boolean {
        try {
            coroutineScope {
                repeat(line.atOnce) {
                    launch { while (begins()) call(stub) }
                }
            }
        } finally { // also after an interrupt
            val seconds = start.elapsedNow().toDouble(DurationUnit.SECONDS)
            write("calls: $calls, failed: $failed, messages: $messages, seconds: %.1f\n".format(Locale.ROOT, seconds))
        }
        return failed == 0L
    }

    /** Returns whether another call may start. The first calls always start. */
    private fun begins(): Boolean {
        val limit = line.loadFor
        val more = if (limit == null) begun < (line.calls ?: line.atOnce.toLong()) else start.elapsedNow() < limit
        if (!more && (limit == null || begun >= line.atOnce)) return false
        begun++
        return true
    }

    private suspend fun call(stub: InferenceServiceCoroutineStub) {
        try {
            stub.withDeadline(line).generate(request).collect { messages++ }
        } catch (error: StatusException) {
            failed++
            report(error)
        }
        calls++
    }
}
