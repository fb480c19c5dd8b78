package io.penstock.example;

import io.grpc.Channel;
import io.penstock.inference.v1.ChatResponse;
import io.penstock.inference.v1.InferenceServiceGrpc;
import io.penstock.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import java.io.IOException;
import java.util.Iterator;

/** Answers a message, and prints the answer as it arrives. */
final class Chat {
  private Chat() {}

  static void run(Channel channel, CommandLine line) throws IOException {
    InferenceServiceBlockingStub stub = Connection.withDeadline(InferenceServiceGrpc.newBlockingStub(channel), line);
    try {
      Iterator<ChatResponse> responses = stub.chat(line.chatRequest(line.prompts.get(0)));
      while (responses.hasNext()) {
        Output.print(responses.next().getContent());
      }
    } finally {
      Output.print("\n");
    }
  }
}
