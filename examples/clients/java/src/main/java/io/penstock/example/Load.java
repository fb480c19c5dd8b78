package io.penstock.example;

import io.grpc.Channel;
import io.grpc.Context;
import io.grpc.stub.StreamObserver;
import io.penstock.inference.v1.GenerateRequest;
import io.penstock.inference.v1.GenerateResponse;
import io.penstock.inference.v1.InferenceServiceGrpc;
import io.penstock.inference.v1.InferenceServiceGrpc.InferenceServiceStub;
import java.util.Locale;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.LongAdder;

/** Makes many calls over one channel, a fixed number of them at the same time, and counts them. */
final class Load {
  private final InferenceServiceStub stub;
  private final CommandLine line;
  private final Semaphore free;
  private final LongAdder calls = new LongAdder();
  private final LongAdder failed = new LongAdder();
  private final LongAdder messages = new LongAdder();

  Load(Channel channel, CommandLine line) {
    this.stub = InferenceServiceGrpc.newStub(channel);
    this.line = line;
    this.free = new Semaphore(line.atOnce);
  }

  /** Makes the calls, and returns whether every call succeeded. */
  boolean run() throws InterruptedException {
    GenerateRequest request = line.generateRequest(line.prompts.get(0));
    long start = System.nanoTime();
    for (long begun = 0; begun < limit(); begun++) {
      free.acquire();
      boolean late = line.loadSeconds > 0 && begun >= line.atOnce && secondsSince(start) >= line.loadSeconds;
      if (late || Context.current().isCancelled()) {
        free.release();
        break;
      }
      Connection.withDeadline(stub, line).generate(request, new Call());
    }
    free.acquire(line.atOnce); // wait until all calls have ended
    System.out.println(
        String.format(
            Locale.ROOT,
            "calls: %d, failed: %d, messages: %d, seconds: %.1f",
            calls.sum(), failed.sum(), messages.sum(), secondsSince(start)));
    return failed.sum() == 0;
  }

  private long limit() {
    if (line.loadSeconds > 0) {
      return Long.MAX_VALUE;
    }
    return line.calls > 0 ? line.calls : line.atOnce;
  }

  private static double secondsSince(long start) {
    return (System.nanoTime() - start) / 1e9;
  }

  /** Receives the messages of one call. */
  private final class Call implements StreamObserver<GenerateResponse> {
    @Override
    public void onNext(GenerateResponse response) {
      messages.increment();
    }

    @Override
    public void onError(Throwable error) {
      if (!Context.current().isCancelled()) { // otherwise, this program has cancelled the call
        calls.increment();
        failed.increment();
        Failure.report(error);
      }
      free.release();
    }

    @Override
    public void onCompleted() {
      calls.increment();
      free.release();
    }
  }
}
