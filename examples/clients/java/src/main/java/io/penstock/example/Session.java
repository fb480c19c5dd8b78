package io.penstock.example;

import io.grpc.Channel;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.penstock.common.v1.FinishReason;
import io.penstock.inference.v1.GenerateResponse;
import io.penstock.inference.v1.GenerateSessionRequest;
import io.penstock.inference.v1.GenerateSessionResponse;
import io.penstock.inference.v1.InferenceServiceGrpc;
import io.penstock.inference.v1.SessionError;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;

/** Continues many prompts on one stream. gRPC calls the methods one at a time, so the class needs no locks. */
final class Session implements ClientResponseObserver<GenerateSessionRequest, GenerateSessionResponse> {
  private static final String FIRST = "0";

  private final Channel channel;
  private final CommandLine line;
  private final CountDownLatch ended = new CountDownLatch(1);
  private final Map<String, StringBuilder> texts = new HashMap<>();
  private ClientCallStreamObserver<GenerateSessionRequest> requests;
  private int sent;
  private int messagesOfFirst;
  private boolean mayAbort;
  private boolean halfClosed;
  private volatile boolean failed;

  Session(Channel channel, CommandLine line) {
    this.channel = channel;
    this.line = line;
    mayAbort = line.abortAfter > 0;
  }

  /** Sends the requests, and returns whether every request succeeded. */
  boolean run() throws InterruptedException {
    Connection.withDeadline(InferenceServiceGrpc.newStub(channel), line).generateSession(this);
    ended.await();
    return !failed;
  }

  @Override
  public void beforeStart(ClientCallStreamObserver<GenerateSessionRequest> stream) {
    requests = stream;
    requests.setOnReadyHandler(this::send);
  }

  /** Sends requests while the stream is ready. Half-closes the stream after the last request, unless one must be aborted. */
  private void send() {
    while (requests.isReady() && sent < line.prompts.size()) {
      var request = line.generateRequest(line.prompts.get(sent)).toBuilder().setRequestId(Integer.toString(sent));
      requests.onNext(GenerateSessionRequest.newBuilder().setGenerate(request).build());
      sent++;
    }
    if (sent == line.prompts.size() && !mayAbort && !halfClosed) {
      halfClosed = true;
      requests.onCompleted();
    }
  }

  @Override
  public void onNext(GenerateSessionResponse response) {
    switch (response.getMessageCase()) {
      case OUTPUT -> receive(response.getOutput());
      case ERROR -> receive(response.getError());
      default -> {} // a message of a later version of the API
    }
  }

  private void receive(GenerateResponse output) {
    String id = output.getRequestId();
    StringBuilder text = texts.computeIfAbsent(id, unused -> new StringBuilder()).append(output.getText());
    if (output.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED) {
      boolean aborted = output.getFinishReason() == FinishReason.FINISH_REASON_ABORT;
      System.out.println("[%s] %s%s".formatted(id, text, aborted ? " (aborted)" : ""));
      hasEnded(id);
    } else if (id.equals(FIRST) && mayAbort && ++messagesOfFirst == line.abortAfter) {
      requests.onNext(GenerateSessionRequest.newBuilder().setAbortRequestId(id).build());
      mayAbort = false;
      send();
    }
  }

  private void receive(SessionError error) {
    failed = true;
    Failure.report(error);
    hasEnded(error.getRequestId());
  }

  private void hasEnded(String id) {
    texts.remove(id);
    if (id.equals(FIRST)) {
      mayAbort = false;
      send();
    }
  }

  @Override
  public void onError(Throwable error) {
    failed = true;
    Failure.report(error);
    ended.countDown();
  }

  @Override
  public void onCompleted() {
    ended.countDown();
  }
}
