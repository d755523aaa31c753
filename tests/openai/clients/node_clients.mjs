// What clients for Node get from the endpoints: `node node_clients.mjs URL` prints a JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.argv[2];
const prompt = "How is Oslo?";
const schema = z.object({ city: z.string(), degrees: z.number().int() });
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `4 degrees in ${city}`,
});

const provider = createOpenAICompatible({
  name: "pytriton", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("clerk");
const agent = { model, prompt, tools: { weather }, stopWhen: stepCountIs(3) };
const found = {};

const plain = await generateText({ model, prompt });
found.generateText = [plain.text.trim(), plain.finishReason, plain.usage.outputTokens];
const whole = await generateText(agent);
found.tools = [whole.text.trim(), whole.steps[0].toolCalls[0].input, whole.steps.length];
found.generateObject = (await generateObject({ model, prompt, schema })).object;

const stream = streamText({ model, prompt });
const parts = [];
for await (const part of stream.textStream) parts.push(part);
found.streamText = [parts.join("").trim(), parts.length > 1, (await stream.usage).outputTokens];
const streamed = streamText(agent);
found.streamTools = [(await streamed.text).trim(), (await streamed.steps)[0].toolCalls[0].input];
const objects = streamObject({ model, prompt, schema });
const partial = [];
for await (const object of objects.partialObjectStream) partial.push(object);
found.streamObject = [await objects.object, partial.length > 1];
const missing = await generateText({ model: provider("nobody"), prompt, maxRetries: 0 }).catch((error) => error);
found.error = [missing.statusCode, missing.message];

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const answer = await client.chat.completions.create({ model: "clerk", messages, tools });
found.openai = answer.choices[0].message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
const runner = client.chat.completions.stream({ model: "clerk", messages });
found.openaiStream = (await runner.finalContent()).trim();
found.openaiResponses = (await client.responses.create({ model: "clerk", input: prompt })).output_text.trim();

console.log(JSON.stringify(found));
