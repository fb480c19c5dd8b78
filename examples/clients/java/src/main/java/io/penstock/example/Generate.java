package io.penstock.example;

import io.grpc.Channel;
import io.penstock.inference.v1.GenerateResponse;
import io.penstock.inference.v1.InferenceServiceGrpc;
import io.penstock.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import java.io.IOException;
import java.util.Iterator;

/** Continues a prompt, and prints the text as it arrives. */
final class Generate {
  private Generate() {}

  static void run(Channel channel, CommandLine line) throws IOException {
    InferenceServiceBlockingStub stub = Connection.withDeadline(InferenceServiceGrpc.newBlockingStub(channel), line);
    try {
      Iterator<GenerateResponse> responses = stub.generate(line.generateRequest(line.prompts.get(0)));
      while (responses.hasNext()) {
        Output.print(responses.next().getText());
      }
    } finally {
      Output.print("\n");
    }
  }
}
