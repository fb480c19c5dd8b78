// Readable descriptions of failed calls.
import { fileURLToPath } from "node:url";

import { status } from "@grpc/grpc-js";
import type { ServiceError } from "@grpc/grpc-js";
import type { RequestError } from "@penstock/protos/common/v1";
import protobuf from "protobufjs";

const details = protobuf.loadSync(fileURLToPath(new URL("../error_details.proto", import.meta.url)));

interface Detail {
  type_url: string;
  value: Uint8Array;
}

export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "metadata" in error && "code" in error;
}

/** Return the code, the message and the google.rpc details of a failed call, as lines of text. */
export function describe(error: ServiceError): string[] {
  const lines = [`${status[error.code]}: ${error.details}`];
  const [encoded] = error.metadata.get("grpc-status-details-bin");
  if (!Buffer.isBuffer(encoded)) return lines;
  for (const { type_url: url, value } of decode("google.rpc.Status", encoded)["details"] as Detail[]) {
    const type = url.slice(url.lastIndexOf("/") + 1);
    if (type === "google.rpc.ErrorInfo") {
      lines.push(`  reason: ${decode(type, value)["reason"]}`);
    } else if (type === "google.rpc.BadRequest") {
      const violations = decode(type, value)["fieldViolations"] as { field: string }[];
      lines.push(...violations.map(({ field }) => `  field: ${field}`));
    } else if (type === "google.rpc.RetryInfo") {
      const { seconds, nanos } = decode(type, value)["retryDelay"] as { seconds: number; nanos: number };
      lines.push(`  retry after: ${Number(seconds) + nanos / 1e9} s`);
    }
  }
  return lines;
}

/** Do the same for a failed request of a session. The other requests of the session continue. */
export function describeOne(error: RequestError): string[] {
  const lines = [`${error.code}: ${error.message}`, `  reason: ${error.reason}`];
  if (error.field) lines.push(`  field: ${error.field}`);
  if (error.retryAfter !== undefined) lines.push(`  retry after: ${error.retryAfter} s`);
  return lines;
}

function decode(type: string, bytes: Uint8Array): Record<string, unknown> {
  return details.lookupType(type).decode(bytes) as unknown as Record<string, unknown>;
}
