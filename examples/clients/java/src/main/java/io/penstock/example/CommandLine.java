package io.penstock.example;

import io.penstock.common.v1.SamplingParams;
import io.penstock.inference.v1.ChatMessage;
import io.penstock.inference.v1.ChatRequest;
import io.penstock.inference.v1.GenerateRequest;
import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Set;

/** Values of the command line. */
final class CommandLine {
  static final String USAGE =
      """
      usage: client generate [options] PROMPT
             client chat     [options] MESSAGE
             client session  [options] PROMPT...
             client load     [options] PROMPT
        --address HOST:PORT   server (localhost:50051); dns:///NAME:PORT uses all addresses in turn
        --tls                 encrypt the connection
        --ca FILE             file with the certificates to trust; implies --tls
        --timeout SECONDS     deadline of each call
        --model NAME          name of the model; default: the served model
        --max-tokens N        maximum number of output tokens
        --temperature T       sampling temperature; 0: greedy
        --seed N              seed for sampling, which makes the output reproducible
        --stop TEXT           text that ends the output; the option can be repeated
      chat:
        --system TEXT         system message of the conversation
      session:
        --abort-after N       abort the first request after N of its messages
      load:
        --at-once N           number of calls that run at the same time (1)
        --calls N             total number of calls (default: the value of --at-once)
        --for SECONDS         start new calls for this time, instead of --calls
      environment:
        PENSTOCK_API_KEY      API key that the client sends""";

  private static final Set<String> COMMANDS = Set.of("generate", "chat", "session", "load");
  private static final long MAX_UINT32 = (1L << 32) - 1;

  final String command;
  final List<String> prompts = new ArrayList<>();
  String address = "localhost:50051";
  boolean tls;
  String ca = "";
  double timeout; // 0: none
  String system = "";
  int abortAfter; // 0: never
  int atOnce = 1;
  int calls; // 0: not given
  double loadSeconds; // 0: not given

  private final Iterator<String> rest;
  private String model = "";
  /** Has only the parameters that the command line sets. For all others, the model's default applies. */
  private final SamplingParams.Builder params = SamplingParams.newBuilder();

  CommandLine(String[] args) throws UsageException {
    rest = List.of(args).iterator();
    command = rest.hasNext() ? rest.next() : "";
    if (!COMMANDS.contains(command)) {
      throw new UsageException(command.isEmpty() ? "a command is needed" : command + " is no command");
    }
    while (rest.hasNext()) {
      String word = rest.next();
      if (word.equals("--")) {
        rest.forEachRemaining(prompts::add);
      } else if (word.startsWith("-")) {
        readFlag(word);
      } else {
        prompts.add(word);
      }
    }
    check();
  }

  GenerateRequest generateRequest(String prompt) {
    return GenerateRequest.newBuilder().setModel(model).setText(prompt).setSamplingParams(params).build();
  }

  ChatRequest chatRequest(String message) {
    ChatRequest.Builder request = ChatRequest.newBuilder().setModel(model).setSamplingParams(params);
    if (!system.isEmpty()) {
      request.addMessages(ChatMessage.newBuilder().setRole("system").setContent(system));
    }
    return request.addMessages(ChatMessage.newBuilder().setRole("user").setContent(message)).build();
  }

  private void readFlag(String flag) throws UsageException {
    switch (flag) {
      case "--address" -> address = value(flag);
      case "--tls" -> tls = true;
      case "--ca" -> ca = value(flag);
      case "--timeout" -> timeout = seconds(flag);
      case "--model" -> model = value(flag);
      case "--max-tokens" -> params.setMaxTokens((int) integer(flag, 0, MAX_UINT32));
      case "--temperature" -> params.setTemperature(number(flag).floatValue());
      case "--seed" -> params.setSeed(integer(flag, Long.MIN_VALUE, Long.MAX_VALUE));
      case "--stop" -> params.addStop(value(flag));
      default -> readFlagOfCommand(flag);
    }
  }

  private void readFlagOfCommand(String flag) throws UsageException {
    switch (command + " " + flag) {
      case "chat --system" -> system = value(flag);
      case "session --abort-after" -> abortAfter = count(flag);
      case "load --at-once" -> atOnce = count(flag);
      case "load --calls" -> calls = count(flag);
      case "load --for" -> loadSeconds = seconds(flag);
      default -> throw new UsageException(command + " has no option " + flag);
    }
  }

  private void check() throws UsageException {
    if (prompts.isEmpty()) {
      throw new UsageException(command + " needs a " + (command.equals("chat") ? "MESSAGE" : "PROMPT"));
    }
    if (prompts.size() > 1 && !command.equals("session")) {
      throw new UsageException(command + " takes one argument, not " + prompts.size());
    }
    if (calls > 0 && loadSeconds > 0) {
      throw new UsageException("--calls and --for exclude each other");
    }
  }

  private String value(String flag) throws UsageException {
    if (!rest.hasNext()) {
      throw new UsageException(flag + " needs a value");
    }
    return rest.next();
  }

  private BigDecimal number(String flag) throws UsageException {
    String value = value(flag);
    try {
      return new BigDecimal(value);
    } catch (NumberFormatException notOne) {
      throw new UsageException(flag + ": " + value + " is not a number");
    }
  }

  private double seconds(String flag) throws UsageException {
    BigDecimal number = number(flag);
    if (number.signum() <= 0) {
      throw new UsageException(flag + ": " + number + " is not a number of seconds above 0");
    }
    return number.doubleValue();
  }

  private int count(String flag) throws UsageException {
    return (int) integer(flag, 1, Integer.MAX_VALUE);
  }

  private long integer(String flag, long least, long most) throws UsageException {
    String value = value(flag);
    try {
      long number = Long.parseLong(value);
      if (least <= number && number <= most) {
        return number;
      }
    } catch (NumberFormatException notOne) {
      // The message below describes valid values.
    }
    throw new UsageException(flag + ": " + value + " is not a whole number from " + least + " to " + most);
  }
}
