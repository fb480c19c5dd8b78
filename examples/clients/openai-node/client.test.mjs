// Runs against the server at OPENAI_BASE_URL.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const baseURL = process.env.OPENAI_BASE_URL;
assert.ok(baseURL, "OPENAI_BASE_URL must name a server, e.g. http://localhost:8000/v1");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const question = { model, messages: [{ role: "user", content: "hi" }], max_tokens: 12, seed: 7 };

test("a completion has text and usage", async () => {
  const completion = await client.completions.create({ model, prompt: "once", max_tokens: 5, temperature: 0 });
  assert.equal(typeof completion.choices[0].text, "string");
  assert.ok(completion.usage.completion_tokens >= 1);
});

test("a stream joins to the answer in one piece", async () => {
  const whole = await client.chat.completions.create(question);
  const stream = await client.chat.completions.create({ ...question, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a wrong field is named", async () => {
  await assert.rejects(client.chat.completions.create({ ...question, top_p: 7 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "top_p");
    return true;
  });
});

test("an aborted stream leaves no error behind", async () => {
  const stream = await client.chat.completions.create({ ...question, stream: true });
  for await (const _ of stream) break;
});
