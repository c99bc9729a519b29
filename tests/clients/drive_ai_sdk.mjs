// The AI SDK with its providers for OpenAI's two APIs, compatible servers, Anthropic and Ollama.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool as asTool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { DESCRIPTION, main, PARAMETERS, QUESTIONS, SYSTEM } from "./conversation.mjs";

const MODELS = {
  chat: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat("demo"),
  compatible: (url) => createOpenAICompatible({ name: "jaxpage", baseURL: `${url}/v1` })("demo"),
  responses: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses("demo"),
  messages: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("demo"),
  ollama: (url) => createOllama({ baseURL: `${url}/api` })("demo"),
};

await main(async (address, route, stream, tool) => {
  const tools = {
    get_weather: asTool({
      description: DESCRIPTION,
      inputSchema: jsonSchema(PARAMETERS),
      execute: async (args) => tool.call("get_weather", args),
    }),
  };
  const messages = [];
  const texts = [];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    const body = {
      model: MODELS[route](address),
      system: SYSTEM,
      messages,
      tools,
      stopWhen: stepCountIs(8),
      maxRetries: 0,
    };
    let answer;
    if (stream) {
      const errors = [];
      answer = streamText({ ...body, onError: ({ error }) => errors.push(error) });
      await answer.consumeStream();
      if (errors.length) throw errors[0];
    } else {
      answer = await generateText(body);
    }
    messages.push(...(await answer.response).messages);
    texts.push(await answer.text);
  }
  return { texts };
});
