// The API's documentation, made from this server's own /openapi.json.

import { getJson } from "./api.js";

const find = (id) => document.getElementById(id);

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function typeOf(schema, schemas) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map((option) => typeOf(option, schemas)).filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items, schemas) || "anything"}`;
  return schema.type ?? "anything";
}

function fieldsTable(name, schemas) {
  const schema = schemas[name];
  const table = element("table");
  table.append(element("caption", name));
  const head = table.createTHead().insertRow();
  for (const title of ["field", "type", ""]) head.append(element("th", title));
  const body = table.createTBody();
  for (const [field, definition] of Object.entries(schema.properties ?? {})) {
    const row = body.insertRow();
    row.append(element("th", field), element("td", typeOf(definition, schemas)));
    row.append(element("td", schema.required?.includes(field) ? "required" : (definition.description ?? "")));
  }
  return table;
}

function showRoute(path, method, operation, schemas) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("b", method.toUpperCase(), "method"), element("code", path));
  details.append(summary);
  if (operation.description) details.append(element("p", operation.description));
  for (const parameter of operation.parameters ?? []) {
    const text = `${parameter.in} parameter ${parameter.name}: ${typeOf(parameter.schema, schemas)}`;
    details.append(element("p", parameter.description ? `${text}. ${parameter.description}` : text));
  }
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body?.$ref) details.append(fieldsTable(body.$ref.split("/").at(-1), schemas));
  return details;
}

async function show() {
  const base = `${location.origin}/v1`;
  find("base").textContent = base;
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
