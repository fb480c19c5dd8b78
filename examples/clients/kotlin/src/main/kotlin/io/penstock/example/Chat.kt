package io.penstock.example

import io.penstock.inference.v1.InferenceServiceGrpcKt.InferenceServiceCoroutineStub

/** Answers a message, and prints the answer as it arrives. */
internal suspend fun chat(stub: InferenceServiceCoroutineStub, line: CommandLine) {
    try {
        stub.withDeadline(line).chat(line.chat(line.prompts.single())).collect { response ->
            write(response.content)
        }
    } finally {
        write("\n")
    }
}
