// Calls a Penstock server: continues prompts, answers messages, and makes many calls at once.
import { setMaxListeners } from "node:events";

import { type Options, USAGE, parse } from "./arguments.js";
import { type Call, chat, generate, load, session, tell } from "./commands.js";
import { authorization, connect } from "./connection.js";
import { describe, isServiceError } from "./errors.js";

const EXIT_FAILED = 1;
const EXIT_USAGE = 2;
const EXIT_INTERRUPTED = 130;
const RUN: Record<Options["command"], (call: Call, options: Options) => Promise<number>> = { generate, chat, session, load };

async function main(options: Options): Promise<number> {
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const { signal } = interrupt;
  setMaxListeners(0, signal); // every running call adds a listener
  const client = connect(options.address, options);
  try {
    const exit = await RUN[options.command]({ client, metadata: authorization(process.env["PENSTOCK_API_KEY"]), signal }, options);
    return signal.aborted ? EXIT_INTERRUPTED : exit;
  } catch (error) {
    if (signal.aborted) return EXIT_INTERRUPTED;
    if (!isServiceError(error)) throw error;
    tell(describe(error));
    return EXIT_FAILED;
  } finally {
    if (options.command === "generate" || options.command === "chat") process.stdout.write("\n");
    client.close();
  }
}

process.stdout.on("error", (error: NodeJS.ErrnoException) => {
  if (error.code !== "EPIPE") throw error;
  process.exit(EXIT_FAILED); // the reader of the output has exited, as with `| head`
});
let options: Options;
try {
  options = parse(process.argv.slice(2));
} catch (error) {
  tell([(error as Error).message, USAGE]);
  process.exit(EXIT_USAGE);
}
try {
  process.exitCode = await main(options);
} catch (error) {
  tell([(error as Error).message]);
  process.exitCode = EXIT_FAILED;
}
