// Calls of the page's own server, with the token of the run where it has one.

const KEY = "api-token";
const dialog = () => document.getElementById("token");
let asking = null;

const linked = location.hash.match(/^#token=(.+)$/); // a link to log in; the part behind # is never sent to a server
if (linked) {
  sessionStorage.setItem(KEY, linked[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

/** The JSON of `path` under `/dashboard/api/`; parameters that are empty are left out. Throws an Error with the server's reason. */
export const fetchJson = async (path, parameters = {}, patience = 20000) => (await call(path, parameters, {}, patience)).json();

/** The same as text. */
export const fetchText = async (path, parameters) => (await call(path, parameters, {}, 60000)).text();

/** Puts a JSON document there. */
export function put(path, parameters, content) {
  return call(path, parameters, { method: "PUT", body: JSON.stringify(content), headers: { "content-type": "application/json" } }, 20000);
}

async function call(path, parameters, options, patience) {
  const url = new URL(`api/${path.replace(/^\/?(dashboard\/)?(api\/)?/, "")}`, document.baseURI);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
    const response = await fetch(url, { ...options, headers, signal: AbortSignal.timeout(patience) });
    if (response.ok) return response;
    if (response.status !== 401) throw await reason(response);
    await ask(token);
  }
}

async function reason(response) {
  const said = await response.json().catch(() => null);
  const { message, remedy } = said?.error ?? {};
  const error = new Error(message ? [message, remedy].filter(Boolean).join(": ") : `HTTP ${response.status}`);
  error.status = response.status;
  return error;
}

/** Asks the person for the token, once for all calls that wait for it; `refused` is one that was wrong. */
function ask(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return undefined; // another call has got one meanwhile
  asking ??= new Promise((done) => {
    const value = document.getElementById("token-value");
    document.getElementById("token-wrong").hidden = refused === null;
    dialog().addEventListener(
      "close",
      () => {
        if (value.value) sessionStorage.setItem(KEY, value.value);
        value.value = "";
        asking = null;
        done();
      },
      { once: true },
    );
    dialog().showModal();
  });
  return asking;
}
