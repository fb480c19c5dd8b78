// Streams the answer to a question. `node chat.mjs "What is 12 + 30?"`
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8000/v1", apiKey: "none" });

const models = await client.models.list();
const stream = await client.chat.completions.create({
  model: models.data[0].id,
  messages: [{ role: "user", content: process.argv[2] ?? "What is 12 + 30?" }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
process.stdout.write("\n");
