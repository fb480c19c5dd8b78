package io.penstock.example

import io.grpc.ManagedChannel
import io.grpc.StatusException
import io.penstock.inference.v1.InferenceServiceGrpcKt.InferenceServiceCoroutineStub
import java.io.FileDescriptor
import java.io.FileOutputStream
import java.io.IOException
import java.io.PrintStream
import java.util.concurrent.TimeUnit
import java.util.logging.Level
import java.util.logging.Logger
import kotlin.system.exitProcess
import kotlinx.coroutines.CancellationException

private const val SUCCEEDED = 0
private const val FAILED = 1
private const val USAGE_ERROR = 2
private const val INTERRUPTED = 130

/** gRPC's own log. Its warnings are failures of calls, which this program reports itself. */
private val GRPC_LOG = Logger.getLogger("io.grpc")

fun main(args: Array<String>) {
    // Use UTF-8 with every locale.
    System.setOut(PrintStream(FileOutputStream(FileDescriptor.out), false, Charsets.UTF_8))
    System.setErr(PrintStream(FileOutputStream(FileDescriptor.err), false, Charsets.UTF_8))
    GRPC_LOG.level = Level.SEVERE
    exitProcess(run(args.toList()))
}

private fun run(args: List<String>): Int =
    try {
        val line = CommandLine(args)
        val channel = openChannel(line)
        val succeeded = untilInterrupted { channel.use { run(line, InferenceServiceCoroutineStub(channel)) } }
        if (succeeded) SUCCEEDED else FAILED
    } catch (error: UsageException) {
        System.err.println("${error.message}\n$USAGE")
        USAGE_ERROR
    } catch (error: IOException) {
        System.err.println(error.message)
        FAILED
    } catch (_: CancellationException) {
        INTERRUPTED
    }

/** Runs the command, and returns whether all calls succeeded. */
private suspend fun run(line: CommandLine, stub: InferenceServiceCoroutineStub): Boolean =
    try {
        when (line.command) {
            "generate" -> generate(stub, line).let { true }
            "chat" -> chat(stub, line).let { true }
            "session" -> Session(line).run(stub)
            else -> Load(line).run(stub)
        }
    } catch (error: StatusException) {
        report(error)
        false
    } catch (_: BrokenPipe) {
        false // the reader of the output has exited, so no message is needed
    }

/** Closes the channel after [block], and waits until the server has been notified. */
private inline fun <T> ManagedChannel.use(block: () -> T): T =
    try {
        block()
    } finally {
        shutdownNow().awaitTermination(1, TimeUnit.SECONDS)
    }
