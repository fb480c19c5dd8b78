// The commands: one function per command. Each function returns an exit code.
import type { ClientReadableStream, Metadata } from "@grpc/grpc-js";
import { FinishReason, SamplingParams } from "@penstock/protos/common/v1";
import {
  ChatRequest,
  GenerateRequest,
  GenerateSessionRequest,
  type GenerateSessionResponse,
  type InferenceServiceClient,
} from "@penstock/protos/inference/v1";

import type { Options } from "./arguments.js";
import { within } from "./connection.js";
import { describe, describeOne, isServiceError } from "./errors.js";

const EXIT_FAILED = 1;

/** Client and metadata for the calls of a command. When `signal` is aborted, the calls are cancelled. */
export interface Call {
  client: InferenceServiceClient;
  metadata: Metadata;
  signal: AbortSignal;
}

export function tell(lines: string[]): void {
  process.stderr.write(lines.join("\n") + "\n");
}

// Returns the sampling parameters of the command line. If a field is undefined, the model's default applies.
function params(options: Options): SamplingParams {
  const { maxTokens, temperature, seed, stop } = options;
  return SamplingParams.fromPartial({ maxTokens, temperature, seed, stop });
}

function request(options: Options, text: string, requestId = ""): GenerateRequest {
  const prompt = { $case: "text" as const, value: text };
  return GenerateRequest.fromPartial({ model: options.model, requestId, prompt, samplingParams: params(options) });
}

/** Yields the messages of a stream. If the loop ends early or the signal is aborted, the engine stops the work of the call. */
async function* messages<T>(call: ClientReadableStream<T>, signal: AbortSignal): AsyncGenerator<T> {
  const cancel = () => call.cancel();
  signal.addEventListener("abort", cancel);
  if (signal.aborted) cancel();
  try {
    for await (const message of call) yield message as T;
  } finally {
    signal.removeEventListener("abort", cancel);
    cancel();
  }
}

/** Print the text as it arrives. */
export async function generate({ client, metadata, signal }: Call, options: Options): Promise<number> {
  const call = client.generate(request(options, options.texts[0]!), metadata, within(options.timeout));
  for await (const response of messages(call, signal)) process.stdout.write(response.text);
  return 0;
}

/** Print the answer as it arrives. */
export async function chat({ client, metadata, signal }: Call, options: Options): Promise<number> {
  const turns = options.system ? [{ role: "system", content: options.system }] : [];
  const conversation = [...turns, { role: "user", content: options.texts[0]! }];
  const asked = ChatRequest.fromPartial({
    model: options.model,
    messages: conversation,
    samplingParams: params(options),
  });
  const call = client.chat(asked, metadata, within(options.timeout));
  for await (const response of messages(call, signal)) process.stdout.write(response.content);
  return 0;
}

/** Continue all prompts over one stream, and print each text when it is complete. */
export async function session({ client, metadata, signal }: Call, options: Options): Promise<number> {
  const call = client.generateSession(metadata, within(options.timeout));
  for (const [number, text] of options.texts.entries()) {
    call.write(GenerateSessionRequest.fromPartial({ message: { $case: "generate", value: request(options, text, `${number}`) } }));
  }
  let open = options.abortAfter !== undefined;
  if (!open) call.end();
  let exit = 0;
  let ofFirst = 0;
  const texts = new Map<string, string>();
  for await (const response of messages(call, signal)) {
    const { id, ended, failed } = take(response, texts);
    if (failed) exit = EXIT_FAILED;
    if (!open || id !== "0") continue;
    ofFirst += 1;
    if (!ended && ofFirst < options.abortAfter!) continue;
    if (!ended) call.write(GenerateSessionRequest.fromPartial({ message: { $case: "abortRequestId", value: "0" } }));
    call.end();
    open = false;
  }
  return exit;
}

// Processes a message. Prints a text that is complete, or the error of a request.
function take({ message }: GenerateSessionResponse, texts: Map<string, string>): { id: string; ended: boolean; failed: boolean } {
  if (message === undefined) throw new Error("the server has sent an empty message");
  if (message.$case === "error") {
    const { requestId: id, error } = message.value;
    const [first, ...lines] = error === undefined ? ["no reason is given"] : describeOne(error);
    tell([`[${id}] ${first}`, ...lines]);
    return { id, ended: true, failed: true };
  }
  const { requestId: id, text, finishReason } = message.value;
  texts.set(id, (texts.get(id) ?? "") + text);
  const ended = finishReason !== FinishReason.FINISH_REASON_UNSPECIFIED;
  const aborted = finishReason === FinishReason.FINISH_REASON_ABORT ? " (aborted)" : "";
  if (ended) process.stdout.write(`[${id}] ${texts.get(id)}${aborted}\n`);
  return { id, ended, failed: false };
}

/** Make many Generate calls, several at the same time, and count them. */
export async function load({ client, metadata, signal }: Call, options: Options): Promise<number> {
  const asked = request(options, options.texts[0]!);
  const start = performance.now();
  const elapsed = () => (performance.now() - start) / 1000;
  let [begun, calls, failed, received] = [0, 0, 0, 0];
  const more = () => (options.for === undefined ? begun < (options.calls ?? options.atOnce) : elapsed() < options.for);

  async function oneAfterTheOther(): Promise<void> {
    while (!signal.aborted && more()) {
      begun += 1;
      try {
        const call = client.generate(asked, metadata, within(options.timeout));
        for await (const _ of messages(call, signal)) received += 1;
      } catch (error) {
        if (signal.aborted) return;
        if (!isServiceError(error)) throw error;
        tell(describe(error));
        failed += 1;
      }
      calls += 1;
    }
  }

  await Promise.all(Array.from({ length: options.atOnce }, oneAfterTheOther));
  process.stdout.write(`calls: ${calls}, failed: ${failed}, messages: ${received}, seconds: ${elapsed().toFixed(1)}\n`);
  return failed ? EXIT_FAILED : 0;
}
