// Parsing of the command line.
import { parseArgs } from "node:util";

export const COMMANDS = ["generate", "chat", "session", "load"] as const;
export type Command = (typeof COMMANDS)[number];

/** Values of the command line. A value is undefined if the command line does not have it. */
export interface Options {
  command: Command;
  address: string;
  tls: boolean;
  ca: string | undefined;
  timeout: number | undefined;
  model: string;
  maxTokens: number | undefined;
  temperature: number | undefined;
  /** 64-bit integer, which a number cannot store exactly. */
  seed: bigint | undefined;
  stop: string[];
  system: string;
  abortAfter: number | undefined;
  atOnce: number;
  calls: number | undefined;
  for: number | undefined;
  texts: string[];
}

export const USAGE = `usage: client generate [options] PROMPT
       client chat     [options] [--system TEXT] MESSAGE
       client session  [options] [--abort-after N] PROMPT...
       client load     [options] [--at-once N] [--calls N | --for SECONDS] PROMPT
  --address HOST:PORT  server (localhost:50051)
  --tls                encrypt the connection
  --ca FILE            file with the certificates to trust; implies --tls
  --timeout SECONDS    deadline of each call
  --model NAME         name of the model; default: the served model
  --max-tokens N       maximum number of output tokens
  --temperature T      sampling temperature; 0: greedy
  --seed N             seed for sampling, which makes the output reproducible
  --stop TEXT          text that ends the output; the option can be repeated`;

const OWN: Record<Command, string[]> = {
  generate: [],
  chat: ["system"],
  session: ["abort-after"],
  load: ["at-once", "calls", "for"],
};
const MAX_COUNT = 2n ** 31n - 1n;

/** Parses the arguments after the program's name. Throws an Error with a message if the arguments are wrong. */
export function parse(args: string[]): Options {
  const [command, ...rest] = args;
  if (command === undefined) throw new Error("a command is needed");
  if (!isCommand(command)) throw new Error(`there is no command '${command}'`);
  const text = { type: "string" } as const;
  const names = ["address", "ca", "timeout", "model", "max-tokens", "temperature", "seed", ...OWN[command]];
  const options = Object.fromEntries(names.map((name) => [name, text]));
  const { values, positionals } = parseArgs({
    args: joined(rest),
    allowPositionals: true,
    options: { ...options, stop: { ...text, multiple: true }, tls: { type: "boolean" } },
  });
  const given = values as Record<string, string | undefined>;
  if (positionals.length < 1) throw new Error("a prompt is needed");
  if (positionals.length > 1 && command !== "session") throw new Error(`one prompt is needed, not ${positionals.length}`);
  if (given["calls"] !== undefined && given["for"] !== undefined) throw new Error("--calls and --for cannot both be given");
  const whole = (name: string, low: bigint, high: bigint) => readWhole(name, given[name], low, high);
  const count = (name: string) => toNumber(whole(name, 1n, MAX_COUNT));
  return {
    command,
    address: given["address"] ?? "localhost:50051",
    tls: (values as { tls?: boolean }).tls ?? false,
    ca: given["ca"],
    timeout: readReal("timeout", given["timeout"], { above0: true }),
    model: given["model"] ?? "",
    maxTokens: toNumber(whole("max-tokens", 0n, 2n ** 32n - 1n)),
    temperature: readReal("temperature", given["temperature"]),
    seed: whole("seed", -(2n ** 63n), 2n ** 63n - 1n),
    stop: (values as { stop?: string[] }).stop ?? [],
    system: given["system"] ?? "",
    abortAfter: count("abort-after"),
    atOnce: count("at-once") ?? 1,
    calls: count("calls"),
    for: readReal("for", given["for"], { above0: true }),
    texts: positionals,
  };
}

function isCommand(name: string): name is Command {
  return (COMMANDS as readonly string[]).includes(name);
}

// parseArgs treats a negative number as an option, so `--seed -1` must become `--seed=-1`.
function joined(args: string[]): string[] {
  const result: string[] = [];
  for (const arg of args) {
    const last = result.at(-1);
    if (/^-\d/.test(arg) && last !== undefined && /^--[a-z-]+$/.test(last)) result[result.length - 1] = `${last}=${arg}`;
    else result.push(arg);
  }
  return result;
}

function readWhole(name: string, text: string | undefined, low: bigint, high: bigint): bigint | undefined {
  if (text === undefined) return undefined;
  const value = /^-?\d+$/.test(text) ? BigInt(text) : undefined;
  if (value === undefined || value < low || value > high) {
    throw new Error(`--${name} is '${text}'; it must be a whole number from ${low} to ${high}`);
  }
  return value;
}

function readReal(name: string, text: string | undefined, { above0 = false } = {}): number | undefined {
  if (text === undefined) return undefined;
  const value = text.trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(value) || (above0 && value <= 0)) {
    throw new Error(`--${name} is '${text}'; it must be a number${above0 ? " above 0" : ""}`);
  }
  return value;
}

function toNumber(value: bigint | undefined): number | undefined {
  return value === undefined ? undefined : Number(value);
}
