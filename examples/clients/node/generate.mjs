// Stream the continuation of a prompt from a Penstock server.
import { parseArgs } from "node:util";

import { connect, describe, generate } from "./client.mjs";

const USAGE = `usage: node generate.mjs [options] PROMPT
  --address HOST:PORT  server (localhost:50051)
  --model NAME         name of the model; by default the one that is served
  --max-tokens N       longest output in tokens
  --temperature T      0 is greedy
  --seed N             makes the output reproducible
  --stop TEXT          a string that ends the output; repeatable
  --timeout SECONDS    deadline of the call
  --tls                encrypt the connection
  --ca FILE            certificates to trust; with it, --tls is not needed`;

function parseArguments() {
  const text = { type: "string" };
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      address: { ...text, default: "localhost:50051" },
      model: text,
      "max-tokens": text,
      temperature: text,
      seed: text,
      stop: { ...text, multiple: true },
      timeout: text,
      tls: { type: "boolean" },
      ca: text,
    },
  });
  if (positionals.length !== 1) throw new Error("one prompt is needed");
  for (const name of ["max-tokens", "temperature", "seed", "timeout"]) {
    if (Number.isNaN(Number(values[name] ?? 0))) throw new Error(`--${name} is '${values[name]}'; it must be a number`);
  }
  return { ...values, prompt: positionals[0] };
}

function number(text) {
  return text === undefined ? undefined : Number(text);
}

async function main(args) {
  const request = {
    model: args.model,
    text: args.prompt,
    // A field left out takes the model's default, so only what was asked for is set.
    samplingParams: {
      maxTokens: number(args["max-tokens"]),
      temperature: number(args.temperature),
      seed: args.seed, // 64 bits: text, because a number would lose some
      stop: args.stop,
    },
  };
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const client = connect(args.address, args);
  const options = {
    timeout: number(args.timeout),
    signal: interrupt.signal,
    key: process.env.PENSTOCK_API_KEY,
  };
  try {
    for await (const response of generate(client, request, options)) {
      process.stdout.write(response.text);
    }
    return 0;
  } catch (error) {
    if (interrupt.signal.aborted) return 130;
    if (error.metadata === undefined) throw error;
    const { code, message, reason, fields, retryAfter } = describe(error);
    console.error(`${code}: ${message}`);
    if (reason) console.error(`  reason: ${reason}`);
    for (const { field, description } of fields) console.error(`  field: ${field}: ${description}`);
    if (retryAfter !== undefined) console.error(`  retry after: ${retryAfter} s`);
    return 1;
  } finally {
    process.stdout.write("\n");
    client.close();
  }
}

let args;
try {
  args = parseArguments();
} catch (error) {
  console.error(`${error.message}\n${USAGE}`);
  process.exit(2);
}
process.exitCode = await main(args);
