// OpenAI's client for Node: chat completions, with its helper that runs tools, and responses.
import OpenAI from "openai";
import { FUNCTION, main, QUESTIONS, SYSTEM } from "./conversation.mjs";

async function chat(client, stream, tool) {
  const messages = [{ role: "system", content: SYSTEM }];
  const tools = [
    {
      type: "function",
      function: {
        ...FUNCTION,
        parse: JSON.parse,
        function: (args) => tool.call("get_weather", args),
      },
    },
  ];
  const texts = [];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    const runner = client.chat.completions.runTools({ model: "demo", messages, tools, stream });
    texts.push(await runner.finalContent());
    messages.splice(0, messages.length, ...runner.messages);
  }
  return { texts };
}

async function responses(client, stream, tool) {
  const input = [];
  const texts = [];
  for (const question of QUESTIONS) {
    input.push({ role: "user", content: question });
    for (;;) {
      const body = {
        model: "demo",
        instructions: SYSTEM,
        input,
        tools: [{ type: "function", strict: false, ...FUNCTION }],
        store: false,
        include: ["reasoning.encrypted_content"],
      };
      const answer = stream
        ? await client.responses.stream(body).finalResponse()
        : await client.responses.create(body);
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === "function_call");
      for (const call of calls) {
        const output = tool.call(call.name, JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
      if (calls.length === 0) {
        texts.push(answer.output_text);
        break;
      }
    }
  }
  return { texts };
}

await main((address, route, stream, tool) => {
  const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
  return (route === "chat" ? chat : responses)(client, stream, tool);
});
