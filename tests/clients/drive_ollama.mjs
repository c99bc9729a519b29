// Ollama's client for Node, with thinking.
import { Ollama } from "ollama";
import { FUNCTION, main, QUESTIONS, SYSTEM } from "./conversation.mjs";

await main(async (address, route, stream, tool) => {
  const client = new Ollama({ host: address });
  const messages = [{ role: "system", content: SYSTEM }];
  const texts = [];
  const reasoning = [];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    for (;;) {
      const tools = [{ type: "function", function: FUNCTION }];
      const body = { model: "demo", messages, tools, think: true, stream };
      let message = { role: "assistant", content: "", thinking: "", tool_calls: [] };
      if (stream) {
        for await (const part of await client.chat(body)) {
          message.content += part.message.content ?? "";
          message.thinking += part.message.thinking ?? "";
          message.tool_calls.push(...(part.message.tool_calls ?? []));
        }
      } else {
        message = (await client.chat(body)).message;
      }
      messages.push(message);
      reasoning.push(message.thinking);
      for (const call of message.tool_calls ?? []) {
        const { name, arguments: args } = call.function;
        messages.push({ role: "tool", tool_name: name, content: tool.call(name, args) });
      }
      if (!message.tool_calls?.length) break;
    }
    texts.push(messages.at(-1).content);
  }
  return { texts, reasoning };
});
