package io.penstock.example

import io.penstock.common.v1.FinishReason
import io.penstock.inference.v1.GenerateResponse
import io.penstock.inference.v1.GenerateSessionRequest
import io.penstock.inference.v1.GenerateSessionResponse.MessageCase
import io.penstock.inference.v1.InferenceServiceGrpcKt.InferenceServiceCoroutineStub
import io.penstock.inference.v1.SessionError
import io.penstock.inference.v1.copy
import io.penstock.inference.v1.generateSessionRequest
import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow

private const val FIRST = "0"

/** Continues many prompts on one stream. */
internal class Session(private val line: CommandLine) {
    private val texts = mutableMapOf<String, StringBuilder>()
    private var messagesOfFirst = 0
    private var failed = false

    /** Whether to abort the first request. Known when its messages have arrived, or when it has ended. */
    private val abortsFirst = CompletableDeferred<Boolean>()

    /** Sends the requests, and returns whether every request succeeded. */
    suspend fun run(stub: InferenceServiceCoroutineStub): Boolean {
        stub.withDeadline(line).generateSession(requests()).collect { response ->
            when (response.messageCase) {
                MessageCase.OUTPUT -> receive(response.output)
                MessageCase.ERROR -> receive(response.error)
                else -> {} // a message of a later version of the API
            }
        }
        return !failed
    }

    /** Returns the requests to send. At the end of the flow, gRPC half-closes the stream. */
    private fun requests(): Flow<GenerateSessionRequest> = flow {
        line.prompts.forEachIndexed { index, prompt ->
            emit(generateSessionRequest { generate = line.generate(prompt).copy { requestId = index.toString() } })
        }
        if (line.abortAfter != null && abortsFirst.await()) {
            emit(generateSessionRequest { abortRequestId = FIRST })
        }
    }

    private fun receive(output: GenerateResponse) {
        val id = output.requestId
        val text = texts.getOrPut(id, ::StringBuilder).append(output.text)
        if (output.finishReason != FinishReason.FINISH_REASON_UNSPECIFIED) {
            val aborted = output.finishReason == FinishReason.FINISH_REASON_ABORT
            write("[$id] $text${if (aborted) " (aborted)" else ""}\n")
            hasEnded(id)
        } else if (id == FIRST && ++messagesOfFirst == line.abortAfter) {
            abortsFirst.complete(true)
        }
    }

    private fun receive(error: SessionError) {
        failed = true
        report(error)
        hasEnded(error.requestId)
    }

    private fun hasEnded(id: String) {
        texts.remove(id)
        if (id == FIRST) abortsFirst.complete(false) // has no effect if the request was aborted
    }
}
