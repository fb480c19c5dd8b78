package io.penstock.example;

import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.TimeUnit;
import java.util.logging.Level;
import java.util.logging.Logger;

/** A client of a Penstock server: one command, one channel, one exit code. */
public final class Client {
  private static final int FAILED = 1;
  private static final int USAGE = 2;
  private static final int INTERRUPTED = 130;

  /** gRPC's own log. Its warnings are failures of calls, which this program reports itself. */
  private static final Logger GRPC = Logger.getLogger("io.grpc");

  private Client() {}

  public static void main(String[] args) throws Exception {
    // Use UTF-8 with every locale.
    System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8));
    System.setErr(new PrintStream(new FileOutputStream(FileDescriptor.err), false, StandardCharsets.UTF_8));
    GRPC.setLevel(Level.SEVERE);
    try {
      System.exit(run(new CommandLine(args)));
    } catch (UsageException error) {
      System.err.println(error.getMessage() + "\n" + CommandLine.USAGE);
      System.exit(USAGE);
    } catch (IOException error) {
      System.err.println(error.getMessage());
      System.exit(FAILED);
    }
  }

  private static int run(CommandLine line) throws Exception {
    ManagedChannel channel = Connection.open(line);
    try (Interrupt interrupt = new Interrupt()) {
      try {
        boolean good = interrupt.context().call(() -> run(line, channel));
        return interrupt.happened() ? INTERRUPTED : good ? 0 : FAILED;
      } finally {
        channel.shutdownNow().awaitTermination(1, TimeUnit.SECONDS);
      }
    }
  }

  /** Runs the command, and returns whether all calls succeeded. */
  private static boolean run(CommandLine line, ManagedChannel channel) throws InterruptedException {
    try {
      switch (line.command) {
        case "generate" -> Generate.run(channel, line);
        case "chat" -> Chat.run(channel, line);
        case "session" -> {
          return new Session(channel, line).run();
        }
        default -> {
          return new Load(channel, line).run();
        }
      }
      return true;
    } catch (StatusRuntimeException error) {
      Failure.report(error);
      return false;
    } catch (IOException brokenPipe) {
      return false; // the reader of the output has exited, so no message is needed
    }
  }
}
