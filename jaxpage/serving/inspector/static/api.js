// Talks to the server that the page came from. The API key is asked for once and kept in this
// module alone: it is gone with the page.

const BROKE_OFF = "The connection to the server broke off.";
let apiKey = "";
let askForKey = async () => "";

/** Sets the dialog that asks for the API key. It resolves to the key that was typed, or to "". */
export const setKeyDialog = (ask) => (askForKey = ask);

/** The server's answer in place of what was asked for. `status` is 0 where it did not answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns a response that is fine. Raises ApiError with the server's own message. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    if (response.status === 401 && (apiKey = await askForKey(apiKey !== ""))) continue;
    throw new ApiError(await messageOf(response), response.status);
  }
}

async function send(path, body, signal) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  try {
    return await fetch(new URL(`..${path}`, document.baseURI), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0);
  }
}

async function messageOf(response) {
  try {
    const { error } = await response.json();
    return error.param ? `${error.message} (${error.param})` : error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/**
 * Yields the JSON messages of an event stream, up to its end or [DONE]. Raises ApiError for an
 * error frame, and where the stream breaks off.
 */
export async function* messages(response) {
  const decoder = new TextDecoder();
  let buffer = "";
  for await (const bytes of chunksOf(response.body)) {
    buffer += decoder.decode(bytes, { stream: true });
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = events.pop();
    for (const event of events) {
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (!data) continue; // a comment that keeps the connection open
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new ApiError(message.error.message, response.status);
      yield message;
    }
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(BROKE_OFF, 0);
  }
}

/** Returns the JSON of an answer that comes at once. Raises ApiError where it breaks off. */
export async function readJson(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(BROKE_OFF, 0);
  }
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await next(reader); !part.done; part = await next(reader)) yield part.value;
  } finally {
    await reader.cancel().catch(() => {});
  }
}
