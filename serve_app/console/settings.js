// The dialog with the API key and the settings of a conversation's requests.

import { apiKey } from "./api.js";
import { element, find, iconButton } from "./dom.js";
import { GROUPS, initialSettings } from "./fields.js";

export class SettingsDialog {
  /**
   * `onKey`: called after a new API key. `onChange`: called after a change of the shown
   * conversation's settings.
   */
  constructor({ onKey, onChange }) {
    this.dialog = find("settings");
    this.settings = {};
    this.onChange = onChange;
    this.inputs = new Map();
    find("settings-close").append(iconButton("close", "Close the settings", () => this.dialog.close()));
    find("settings-groups").append(...GROUPS.map((group) => this.group(group)));
    find("settings-reset").addEventListener("click", () => this.reset());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // a click outside the dialog
    });
    this.startKey(onKey);
  }

  startKey(onKey) {
    const [key, kept] = [find("api-key"), find("api-key-kept")];
    key.value = apiKey.get();
    kept.checked = apiKey.isKept();
    const change = () => {
      apiKey.set(key.value.trim(), kept.checked);
      this.say("");
      onKey();
    };
    key.addEventListener("change", change);
    kept.addEventListener("change", change);
    find("settings-form").addEventListener("submit", (event) => {
      event.preventDefault(); // Enter in a field, whose change was already handled
      this.dialog.close();
    });
  }

  group({ title, fields }) {
    const open = title === "Model" || title === "Sampling";
    const box = element("div", { class: "fields" }, ...fields.map((field) => this.field(field)));
    return element("details", { open }, element("summary", {}, title), box);
  }

  field(field) {
    const id = `setting-${field.name}`;
    const common = { id, placeholder: field.placeholder, "aria-describedby": field.hint && `${id}-hint` };
    let input;
    if (field.options) {
      input = element("select", { id }, ...field.options.map(([value, text]) => new Option(text, value)));
    } else if (field.area) {
      input = element("textarea", { ...common, rows: field.area, spellcheck: !field.code, class: field.code ? "code-input" : "" });
    } else {
      input = element("input", { ...common, type: field.kind === "number" ? "number" : "text", autocomplete: "off" });
      for (const limit of ["min", "max", "step"]) if (field[limit] !== undefined) input[limit] = field[limit];
    }
    input.addEventListener("input", () => this.take(field.name, input));
    this.inputs.set(field.name, input);
    const hint = field.hint && element("small", { id: `${id}-hint`, class: "hint" }, field.hint);
    return element("div", { class: field.area ? "field wide" : "field" }, element("label", { for: id }, field.label), input, hint);
  }

  take(name, input) {
    input.removeAttribute("aria-invalid");
    this.say("");
    if (input.value === "") delete this.settings[name];
    else this.settings[name] = input.value;
    this.onChange();
  }

  /** Shows another conversation's settings. Input is written to this object. */
  show(settings) {
    this.settings = settings;
    for (const [name, input] of this.inputs) {
      input.value = settings[name] ?? "";
      input.removeAttribute("aria-invalid");
    }
  }

  reset() {
    for (const name of this.inputs.keys()) delete this.settings[name];
    this.show(Object.assign(this.settings, initialSettings()));
    this.onChange();
  }

  open() {
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Opens the dialog at the invalid field. */
  complain(error) {
    this.open();
    const input = this.inputs.get(error.field);
    input.closest("details").open = true;
    input.setAttribute("aria-invalid", "true");
    input.focus();
    this.say(error.message);
  }

  askForKey() {
    this.open();
    find("api-key").focus();
    this.say(apiKey.get() ? "The server does not know this API key." : "This server wants an API key.");
  }

  say(text) {
    find("settings-note").textContent = text;
  }
}
