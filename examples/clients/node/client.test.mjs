// Runs against the server at PENSTOCK_ADDRESS.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { status } from "@grpc/grpc-js";

import { connect, describe, generate } from "./client.mjs";

const address = process.env.PENSTOCK_ADDRESS;
assert.ok(address, "PENSTOCK_ADDRESS must name a server, e.g. localhost:50051");

// Goes on until it is stopped, or until the longest sequence of the model.
const LONG = { text: "once upon <hold>", samplingParams: { temperature: 0, ignoreEos: true } };

let client;
before(() => {
  client = connect(address);
});
after(() => client.close());

test("text arrives in pieces, and the last message says why it ended", async () => {
  const responses = [];
  const request = { text: "once upon a time", samplingParams: { temperature: 0, maxTokens: 8 } };
  for await (const response of generate(client, request)) responses.push(response);
  assert.ok(responses.length > 1);
  assert.match(responses.at(-1).finishReason, /^FINISH_REASON_(STOP|LENGTH)$/);
  const tokens = responses.flatMap((response) => response.tokenIds);
  assert.equal(responses.at(-1).usage.completionTokens, tokens.length);
});

test("an aborted signal cancels the call", async () => {
  const interrupt = new AbortController();
  const consume = async () => {
    for await (const _ of generate(client, LONG, { signal: interrupt.signal })) interrupt.abort();
  };
  await assert.rejects(consume, { code: status.CANCELLED });
});

test("a signal aborted before the call cancels it too", async () => {
  const consume = async () => {
    for await (const _ of generate(client, LONG, { signal: AbortSignal.abort() })) assert.fail("nothing should arrive");
  };
  await assert.rejects(consume, { code: status.CANCELLED });
});

test("leaving the loop leaves no error behind", async () => {
  for await (const response of generate(client, LONG)) {
    assert.ok(response.requestId);
    break;
  }
});

test("a deadline ends the call", async () => {
  const consume = async () => {
    for await (const _ of generate(client, LONG, { timeout: 0.05 }));
  };
  await assert.rejects(consume, { code: status.DEADLINE_EXCEEDED });
});

test("a call in the middle of its text ends when it is cancelled, and others go on", async () => {
  const interrupt = new AbortController();
  const text = [];
  const cancelled = async () => {
    for await (const response of generate(client, LONG, { signal: interrupt.signal })) {
      text.push(response.text);
      if (text.length === 2) interrupt.abort();
    }
  };
  const other = async () => {
    let last;
    for await (last of generate(client, { text: "once upon a time", samplingParams: { temperature: 0, maxTokens: 8 } }));
    return last.finishReason;
  };
  const [, finishReason] = await Promise.all([assert.rejects(cancelled, { code: status.CANCELLED }), other()]);
  assert.ok(text.length >= 2);
  assert.match(finishReason, /^FINISH_REASON_(STOP|LENGTH)$/);
});

test("an invalid field is named", async () => {
  const consume = async () => {
    for await (const _ of generate(client, { text: "once", samplingParams: { temperature: -1 } }));
  };
  await assert.rejects(consume, (error) => {
    const { code, reason, fields } = describe(error);
    assert.equal(code, "INVALID_ARGUMENT");
    assert.equal(reason, "INVALID_FIELD");
    assert.deepEqual(fields.map(({ field }) => field), ["sampling_params.temperature"]);
    return true;
  });
});
