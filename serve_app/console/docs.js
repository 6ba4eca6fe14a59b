// Builds the API documentation from this server's /openapi.json.

import { ask, getJson } from "./api.js";

const find = (id) => document.getElementById(id);

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "anything"}`;
  return [schema.type ?? "anything"].flat().filter((name) => name !== "null").join(" or ");
}

/** Returns the limits of a value, to show beside its type (or beside one of its types). */
function limitsOf(schema) {
  const merged = Object.assign({}, ...(schema.anyOf ?? []), schema);
  const low = merged.minimum ?? merged.exclusiveMinimum;
  const high = merged.maximum ?? (merged.exclusiveMaximum === undefined ? undefined : merged.exclusiveMaximum - 1);
  const limits = [];
  if (low !== undefined) limits.push(merged.minimum === undefined ? `above ${low}` : `from ${low}`);
  if (high !== undefined) limits.push(`to ${high}`);
  if (merged.maxLength) limits.push(`${merged.minLength ?? 0} to ${merged.maxLength} characters`);
  if (merged.maxItems) limits.push(`at most ${merged.maxItems}`);
  return limits.join(" ");
}

/** Returns the names of schemas that `schema` or its fields refer to. */
function namesIn(schema) {
  return [...JSON.stringify(schema).matchAll(/"#\/components\/schemas\/(\w+)"/g)].map((found) => found[1]);
}

function fieldsTable(name, schema) {
  const table = element("table");
  table.append(element("caption", schema.description ? `${name}: ${schema.description}` : name));
  const head = table.createTHead().insertRow();
  for (const title of ["field", "type", ""]) head.append(element("th", title));
  const body = table.createTBody();
  const others = { "Ignored.": [], "Ignored; no other value is supported.": [], "Not supported.": [] };
  for (const [field, definition] of Object.entries(schema.properties ?? {})) {
    if (others[definition.description]) {
      others[definition.description].push(definition.enum ? `${field} ${typeOf(definition)}` : field);
      continue;
    }
    const row = body.insertRow();
    row.append(element("th", field), element("td", `${typeOf(definition)} ${limitsOf(definition)}`));
    const notes = [schema.required?.includes(field) ? "Required." : "", definition.description ?? ""];
    row.append(element("td", notes.join(" ").trim()));
  }
  const lines = Object.entries(others).filter(([, names]) => names.length);
  return [table, ...lines.map(([title, names]) => element("p", `${title.slice(0, -1)}: ${names.join(", ")}.`, "hint"))];
}

function fieldsOf(schema, schemas) {
  const names = new Set(namesIn(schema));
  for (const name of names) namesIn(schemas[name]).forEach((inner) => names.add(inner));
  const [first, ...parts] = [...names].map((name) => fieldsTable(name, schemas[name]));
  if (!parts.length) return first;
  const folded = element("details");
  folded.append(element("summary", "Its parts"), ...parts.flat());
  return [...first, folded];
}

function input(label, value, control = element("input")) {
  const row = element("label", label);
  control.value = value;
  row.append(control);
  return [row, control];
}

/** Creates a form that sends the request and shows the response as it arrives. */
function tryOut(path, method, operation) {
  const form = element("form");
  const parameters = (operation.parameters ?? []).map((parameter) => {
    const [row, control] = input(parameter.name, parameter.schema?.default ?? "");
    form.append(row);
    return [parameter, control];
  });
  const json = operation.requestBody?.content["application/json"];
  const [row, body] = input("Body", JSON.stringify(json?.example ?? {}, null, 2), element("textarea"));
  if (json) form.append(row);
  body.rows = body.value.split("\n").length + 1;
  body.spellcheck = false;
  const output = element("pre");
  output.hidden = true;
  output.setAttribute("role", "status");
  form.append(element("button", "Send"), output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let target = path;
    const query = new URLSearchParams();
    for (const [parameter, control] of parameters) {
      if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, encodeURIComponent(control.value));
      else if (control.value) query.set(parameter.name, control.value);
    }
    const options = { method: method.toUpperCase(), headers: {} };
    if (json) Object.assign(options, { body: body.value, headers: { "content-type": "application/json" } });
    output.hidden = false;
    output.textContent = "…";
    try {
      await showAnswer(await ask(query.size ? `${target}?${query}` : target, options), output);
    } catch (error) {
      output.textContent = error.message;
    }
  });
  return form;
}

async function showAnswer(response, output) {
  output.textContent = `${response.status} ${response.statusText}\n`;
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    output.append(JSON.stringify(await response.json(), null, 2));
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.append(part.value);
}

function showRoute(path, method, operation, schemas) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("b", method.toUpperCase(), "method"), element("code", path));
  details.append(summary);
  if (operation.description) details.append(element("p", operation.description));
  for (const parameter of operation.parameters ?? []) {
    const text = `${parameter.in} parameter ${parameter.name}: ${typeOf(parameter.schema)} ${limitsOf(parameter.schema)}`;
    details.append(element("p", parameter.description ? `${text}. ${parameter.description}` : text));
  }
  details.append(tryOut(path, method, operation));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) details.append(...fieldsOf(body, schemas));
  return details;
}

async function show() {
  const base = `${location.origin}/v1`;
  find("base").textContent = base;
  find("origin").textContent = location.origin;
  const [model] = (await getJson("/v1/models")).data;
  const question = { model: model.id, messages: [{ role: "user", content: "Name the capital of France." }] };
  find("example").textContent = `curl ${base}/chat/completions -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(question)}'`;
  const { paths, components } = await getJson("/openapi.json");
  const routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => showRoute(path, method, operation, components?.schemas ?? {})),
  );
  find("routes").replaceChildren(...routes);
}

show().catch((error) => find("routes").replaceChildren(element("p", error.message, "error")));
