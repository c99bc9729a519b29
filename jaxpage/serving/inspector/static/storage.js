// The conversation outlives a reload: it is in this tab's session storage, which ends with the tab.
// The API key never is.

const NAME = "jaxpage.exchanges";
const MAX_CHARACTERS = 4_800_000; // what browsers allow, and more than a request has by default

/** Saves a conversation. The oldest exchanges go where there is no room for all. */
export function saveConversation({ exchanges, ...fields }) {
  try {
    sessionStorage.removeItem(NAME); // an older one is no use, should this one find no room
    for (let first = 0; first < exchanges.length; first++) {
      const text = JSON.stringify({ ...fields, exchanges: exchanges.slice(first) });
      if (text.length <= MAX_CHARACTERS) return sessionStorage.setItem(NAME, text);
    }
  } catch {
    // A browser may forbid storage; the page works without it.
  }
}

/** Returns what was saved, or null. */
export function loadConversation() {
  try {
    return JSON.parse(sessionStorage.getItem(NAME));
  } catch {
    return null;
  }
}
