// Anthropic's client for Node, with thinking.
import Anthropic from "@anthropic-ai/sdk";
import { DESCRIPTION, main, PARAMETERS, QUESTIONS, SYSTEM } from "./conversation.mjs";

await main(async (address, route, stream, tool) => {
  const client = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
  const tools = [{ name: "get_weather", description: DESCRIPTION, input_schema: PARAMETERS }];
  const messages = [];
  const texts = [];
  const reasoning = [];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    for (;;) {
      const body = {
        model: "demo",
        max_tokens: 4096,
        system: SYSTEM,
        messages,
        tools,
        thinking: { type: "adaptive" },
      };
      const answer = stream
        ? await client.messages.stream(body).finalMessage()
        : await client.messages.create(body);
      messages.push({ role: "assistant", content: answer.content });
      const of = (type) => answer.content.filter((block) => block.type === type);
      reasoning.push(...of("thinking").map((block) => block.thinking));
      const results = of("tool_use").map(({ id, name, input }) => {
        return { type: "tool_result", tool_use_id: id, content: tool.call(name, input) };
      });
      if (results.length === 0) {
        texts.push(
          of("text")
            .map((block) => block.text)
            .join(""),
        );
        break;
      }
      messages.push({ role: "user", content: results });
    }
  }
  return { texts, reasoning };
});
