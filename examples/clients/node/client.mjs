// A client of penstock.inference.v1, with the stubs made from the .proto files at start.
import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import * as protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));

const definition = protoLoader.loadSync("penstock/inference/v1/service.proto", {
  includeDirs: [here("../../../protos")],
  enums: String,
  longs: String,
  defaults: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).penstock.inference.v1;
const errorDetails = protobuf.loadSync(here("error_details.proto"));

/** A client for host:port. Close it when done. */
export function connect(address) {
  return new InferenceService(address, grpc.credentials.createInsecure());
}

/**
 * Yields the GenerateResponse messages for a GenerateRequest, names in camelCase.
 *
 * `timeout` is a deadline in seconds, `signal` an AbortSignal. Leaving the loop, aborting the signal or letting the
 * deadline pass ends the work in the engine. A failed call throws a grpc.ServiceError; see `describe`.
 */
export async function* generate(client, request, { timeout, signal } = {}) {
  const options = timeout === undefined ? {} : { deadline: Date.now() + timeout * 1000 };
  const call = client.generate(request, options);
  const cancel = () => call.cancel();
  signal?.addEventListener("abort", cancel);
  if (signal?.aborted) cancel();
  try {
    yield* call;
  } finally {
    signal?.removeEventListener("abort", cancel);
    cancel();
  }
}

/** Code, message and google.rpc details of a grpc.ServiceError; `retryAfter` is in seconds, undefined without one. */
export function describe(error) {
  const described = { code: grpc.status[error.code], message: error.details, reason: "", fields: [] };
  const [encoded] = error.metadata.get("grpc-status-details-bin");
  if (encoded === undefined) return described;
  for (const { type_url: url, value } of decode("google.rpc.Status", encoded).details) {
    const type = url.slice(url.lastIndexOf("/") + 1);
    if (type === "google.rpc.ErrorInfo") {
      described.reason = decode(type, value).reason;
    } else if (type === "google.rpc.BadRequest") {
      described.fields.push(...decode(type, value).fieldViolations);
    } else if (type === "google.rpc.RetryInfo") {
      const { seconds, nanos } = decode(type, value).retryDelay;
      described.retryAfter = Number(seconds) + nanos / 1e9;
    }
  }
  return described;
}

function decode(type, bytes) {
  return errorDetails.lookupType(type).decode(bytes);
}
