// Talks to the server. Paths are relative to the page, so that it also works behind a proxy's prefix.

/** A refusal or a failure, with a sentence for the user. status: 0 when no answer came. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(retryAfter ? `${message} (wait ${retryAfter} s)` : message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${response.status}`;
  throw new ApiError(response.status, capital(message), response.headers.get("Retry-After"));
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The model, its drafts and their limits: GET /speculation. */
export async function loadServer(key) {
  return (await ask("speculation", { headers: headers(key) })).json();
}

/** The chunks of one streamed answer. Ends at [DONE]; throws ApiError for anything else. */
export async function* streamAnswer(chat, body, key, signal) {
  const response = await ask(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, return_rounds: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, capital(chunk.error.message));
    yield chunk;
  }
  throw new ApiError(0, "The connection was lost before the answer ended");
}

/** The data of server-sent events, one `data:` line each. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection was lost before the answer ended");
  } finally {
    reader.cancel().catch(() => {}); // it is over, or broken: either way nothing more is read
  }
}
