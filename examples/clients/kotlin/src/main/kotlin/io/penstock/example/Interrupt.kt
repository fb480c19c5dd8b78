package io.penstock.example

import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.job
import kotlinx.coroutines.runBlocking

private const val PATIENCE_SECONDS = 5L

/** Runs [block] in a coroutine. Ctrl-C cancels it with all its calls, and waits for its end before Java exits. */
internal fun <T> untilInterrupted(block: suspend CoroutineScope.() -> T): T = runBlocking {
    val running = coroutineContext.job
    val ended = CountDownLatch(1)
    val onInterrupt = Thread {
        running.cancel()
        ended.await(PATIENCE_SECONDS, TimeUnit.SECONDS)
    }
    Runtime.getRuntime().addShutdownHook(onInterrupt)
    try {
        block()
    } finally {
        ended.countDown()
    }
}
