// A channel to a Penstock server: balancing, health, retries, keepalive, TLS, and a key in the metadata.
import { readFileSync } from "node:fs";

import { Metadata, credentials } from "@grpc/grpc-js";
import serviceConfig from "@penstock/protos/service_config.json" with { type: "json" };
import { InferenceServiceClient } from "@penstock/protos/inference/v1";

import { POLICY } from "./health.js";

// Calls go in turn to all addresses that the name has, but not to a frontend that leaves. One that failed before anything of its
// answer came is tried again, on the next address.
const SERVICE_CONFIG = { ...serviceConfig, loadBalancingConfig: [{ [POLICY]: serviceConfig.healthCheckConfig }] };
const OPTIONS = {
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  "grpc.keepalive_time_ms": 30_000, // detects a broken connection after 40 s, also in silent streams
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.dns_min_time_between_resolutions_ms": 5_000, // new addresses are found sooner than after 30 s
  "grpc.max_receive_message_length": 64 * 1024 * 1024, // 4 MiB are too few for long log-probabilities
};

export interface Security {
  tls?: boolean | undefined;
  /** File of the certificates to trust, instead of those that Node brings along. */
  ca?: string | undefined;
}

/** A client for host:port, or dns:///host:port. Close it when done. */
export function connect(address: string, { tls = false, ca }: Security = {}): InferenceServiceClient {
  const secured = ca !== undefined || tls;
  const channel = secured ? credentials.createSsl(ca === undefined ? null : readFileSync(ca)) : credentials.createInsecure();
  return new InferenceServiceClient(address, channel, OPTIONS);
}

/** The metadata of a call with an API key. */
export function authorization(key: string | undefined): Metadata {
  const metadata = new Metadata();
  if (key) metadata.set("authorization", `Bearer ${key}`);
  return metadata;
}

/** The options of a call that ends after so many seconds. */
export function within(seconds: number | undefined): { deadline?: number } {
  return seconds === undefined ? {} : { deadline: Date.now() + seconds * 1000 };
}
