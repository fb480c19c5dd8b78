package io.penstock.example;

import io.grpc.Context;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** On Ctrl-C, cancels the calls that started in its context, and waits for the program to end before Java exits. */
final class Interrupt implements AutoCloseable {
  private static final long PATIENCE_SECONDS = 5;

  private final Context.CancellableContext context = Context.current().withCancellation();
  private final CountDownLatch ended = new CountDownLatch(1);

  Interrupt() {
    Runtime.getRuntime().addShutdownHook(new Thread(this::cancel));
  }

  Context context() {
    return context;
  }

  boolean happened() {
    return context.isCancelled();
  }

  /** Tells the handler of Ctrl-C that the program has ended its work. */
  @Override
  public void close() {
    ended.countDown();
  }

  private void cancel() {
    context.cancel(null); // the server is told of each cancelled call, and stops its work in the engine
    try {
      ended.await(PATIENCE_SECONDS, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }
}
