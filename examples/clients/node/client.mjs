// A client of penstock.inference.v1, with the stubs made from the .proto files at start.
import { readFileSync } from "node:fs";
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

const SERVICE_CONFIG = {
  // One connection to each address that the name has, calls in turn.
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [
    {
      name: [{ service: "penstock.inference.v1.InferenceService" }],
      // A call that failed before anything of its answer came is tried again, on the next address.
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.1s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};
const OPTIONS = {
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  "grpc.keepalive_time_ms": 30_000, // a server that vanished is noticed after 40 s, also in a silent stream
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.max_receive_message_length": 64 * 1024 * 1024, // 4 MiB are too few for long log-probabilities
};

/**
 * A client for host:port, or dns:///host:port. Close it when done.
 *
 * It encrypts with `tls`, trusting the certificates that Node brings along, or with the file `ca` of those to trust.
 */
export function connect(address, { tls = false, ca } = {}) {
  const credentials =
    tls || ca ? grpc.credentials.createSsl(ca ? readFileSync(ca) : null) : grpc.credentials.createInsecure();
  return new InferenceService(address, credentials, OPTIONS);
}

/**
 * Yields the GenerateResponse messages for a GenerateRequest, names in camelCase.
 *
 * `timeout` is a deadline in seconds, `signal` an AbortSignal, `key` goes into the metadata as an API key. Leaving the loop, aborting the signal or letting the
 * deadline pass ends the work in the engine. A failed call throws a grpc.ServiceError; see `describe`.
 */
export async function* generate(client, request, { timeout, signal, key } = {}) {
  const metadata = new grpc.Metadata();
  if (key) metadata.set("authorization", `Bearer ${key}`);
  const options = timeout === undefined ? {} : { deadline: Date.now() + timeout * 1000 };
  const call = client.generate(request, metadata, options);
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
