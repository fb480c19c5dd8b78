package io.penstock.example

import io.penstock.inference.v1.InferenceServiceGrpcKt.InferenceServiceCoroutineStub

/** Continues a prompt, and prints the text as it arrives. */
internal suspend fun generate(stub: InferenceServiceCoroutineStub, line: CommandLine) {
    try {
        stub.withDeadline(line).generate(line.generate(line.prompts.single())).collect { response ->
            write(response.text)
        }
    } finally {
        write("\n")
    }
}
