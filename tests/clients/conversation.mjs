// What conversation.py has, for drivers that run in Node.
export const SYSTEM = "You tell the weather.";
export const QUESTIONS = [
  "What is the weather in Paris?",
  "What is the weather in Rome and Oslo?",
  "What is the weather in Lima, then Cairo, then Quito, then Hanoi?",
  "What is the weather in Kyiv?",
  "How many places was that?",
];
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", description: "The name of the city." } },
  required: ["city"],
  additionalProperties: false,
};
export const DESCRIPTION = "Returns the weather of a city.";
export const FUNCTION = { name: "get_weather", description: DESCRIPTION, parameters: PARAMETERS };

export class Weather {
  calls = [];

  call(name, args) {
    this.calls.push([name, args]);
    return `${args.city}: sunny and ${10 + args.city.length} degrees`;
  }
}

// Runs the conversation without and with streaming, and prints a line of JSON for each.
export async function main(converse) {
  const [address, route] = process.argv.slice(2);
  for (const stream of [false, true]) {
    const tool = new Weather();
    const outcome = { stream };
    try {
      Object.assign(outcome, await converse(address, route, stream, tool));
    } catch (error) {
      outcome.error = `${error.stack}\n${error.responseBody ?? ""}`;
    }
    console.log(JSON.stringify({ ...outcome, calls: tool.calls }));
  }
}
