// A channel to a Penstock server, with load balancing, health checks, retries, keepalive, TLS, and an API key in the metadata.
import { readFileSync } from "node:fs";

import { Metadata, credentials } from "@grpc/grpc-js";
import serviceConfig from "@penstock/protos/service_config.json" with { type: "json" };
import { InferenceServiceClient } from "@penstock/protos/inference/v1";

import { POLICY } from "./health.js";

// The channel sends calls in turn to all addresses of the name, except to frontends that are stopping. If a call fails before
// the first message of its response, the channel retries it on the next address.
const SERVICE_CONFIG = { ...serviceConfig, loadBalancingConfig: [{ [POLICY]: serviceConfig.healthCheckConfig }] };
const OPTIONS = {
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  "grpc.keepalive_time_ms": 30_000, // detects a broken connection after 40 s, also in silent streams
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.dns_min_time_between_resolutions_ms": 5_000, // finds new addresses after 5 s instead of 30 s
  "grpc.max_receive_message_length": 64 * 1024 * 1024, // 4 MiB are too few for long log-probabilities
};

export interface Security {
  tls?: boolean | undefined;
  /** File with the certificates to trust, instead of Node's own certificates. */
  ca?: string | undefined;
}

/** Return a client for host:port or dns:///host:port. The caller must close the client. */
export function connect(address: string, { tls = false, ca }: Security = {}): InferenceServiceClient {
  const secured = ca !== undefined || tls;
  const channel = secured ? credentials.createSsl(ca === undefined ? null : readFileSync(ca)) : credentials.createInsecure();
  return new InferenceServiceClient(address, channel, OPTIONS);
}

/** Return the metadata of a call, with the API key. */
export function authorization(key: string | undefined): Metadata {
  const metadata = new Metadata();
  if (key) metadata.set("authorization", `Bearer ${key}`);
  return metadata;
}

/** Return the options of a call whose deadline is this many seconds from now. */
export function within(seconds: number | undefined): { deadline?: number } {
  return seconds === undefined ? {} : { deadline: Date.now() + seconds * 1000 };
}
