// The settings panel: what the next message is asked with.
import { keyStore, settingsStore } from "./store.js";

const USUAL = { temperature: 0, maxTokens: 256, seed: "", compare: false };
const LARGEST_SEED = 2 ** 31;

export class SettingsPanel {
  constructor(root) {
    const find = (id) => root.querySelector(`#${id}`);
    this.root = root;
    this.speculation = find("speculation");
    this.compare = find("compare");
    this.draft = find("draft");
    this.depth = find("depth");
    this.temperature = find("temperature");
    this.maxTokens = find("max-tokens");
    this.seed = find("seed");
    this.key = find("key");
    this.find = find;
    this.drafts = new Map();
    this.saved = { ...USUAL, ...settingsStore.load() };
    this.temperature.value = this.saved.temperature;
    this.maxTokens.value = this.saved.maxTokens;
    this.seed.value = this.saved.seed;
    this.compare.checked = this.saved.compare;
    this.key.value = keyStore.load();
    root.addEventListener("submit", (event) => event.preventDefault()); // each change counts at once
    root.addEventListener("input", (event) => {
      if (event.target === this.draft) this.limitDepth(null);
      this.refresh();
      this.save();
    });
  }

  /** Fills the drafts from GET /speculation. A choice that is still offered stays. */
  offer(server) {
    const before = this.draft.value || this.saved.draft;
    const usable = server.drafts.filter((draft) => draft.depth > 0);
    this.drafts = new Map(usable.map((draft) => [draft.name, draft]));
    this.draft.replaceChildren(...usable.map(option));
    const wanted = this.drafts.has(before) ? before : server.default;
    if (this.drafts.has(wanted)) this.draft.value = wanted;
    if (!this.offered) {
      const off = this.saved.speculation ?? this.drafts.has(server.default);
      this.speculation.checked = off && usable.length > 0;
      this.limitDepth(this.saved.depth ?? null);
      this.offered = true;
    }
    this.speculation.disabled = usable.length === 0;
    this.refresh();
  }

  /** The slider's end is the draft's own depth, where it stands unless a length was chosen. */
  limitDepth(wanted) {
    const most = this.drafts.get(this.draft.value)?.depth ?? 1;
    this.depth.max = most;
    this.depth.value = Math.min(wanted ?? most, most);
  }

  refresh() {
    const on = this.speculation.checked;
    const draft = this.drafts.get(this.draft.value);
    for (const input of [this.draft, this.depth, this.compare]) input.disabled = !on;
    this.find("depth-name").textContent = draft?.tree ? "Depth of the tree" : "Tokens a round";
    this.find("depth-value").textContent = this.depth.value;
    this.find("temperature-value").textContent = Number(this.temperature.value).toFixed(1);
    const what = on ? `${this.draft.value}, ${this.depth.value} deep` : "no speculation";
    const beside = on && this.compare.checked ? ", compared with plain" : "";
    this.find("settings-text").textContent =
      `${what}${beside}, temperature ${Number(this.temperature.value).toFixed(1)}`;
  }

  save() {
    settingsStore.save({
      speculation: this.speculation.checked,
      compare: this.compare.checked,
      draft: this.draft.value,
      depth: Number(this.depth.value),
      temperature: Number(this.temperature.value),
      maxTokens: this.maxTokens.value,
      seed: this.seed.value,
    });
    keyStore.save(this.key.value);
  }

  /** Shows the field for the key, which is hidden where none is needed. */
  askKey() {
    this.root.open = true;
    this.find("key-field").hidden = false;
    this.key.focus();
  }

  /** Settings of the next message; draft null: no speculation. Throws RangeError with a sentence. */
  wanted() {
    const maxTokens = Number(this.maxTokens.value);
    if (!Number.isInteger(maxTokens) || maxTokens < 1) {
      throw new RangeError("The longest answer is a whole number of tokens, 1 or more.");
    }
    if (!/^[0-9]{0,15}$/.test(this.seed.value)) {
      throw new RangeError("The seed is a whole number, or empty for a random one.");
    }
    const random = crypto.getRandomValues(new Uint32Array(1))[0] % LARGEST_SEED;
    return {
      draft: this.speculation.checked ? this.draft.value : null,
      depth: Number(this.depth.value),
      temperature: Number(this.temperature.value),
      maxTokens,
      seed: this.seed.value === "" ? random : Number(this.seed.value),
    };
  }

  /** Whether the same prompt runs once more, without speculation. */
  get compared() {
    return this.speculation.checked && this.compare.checked;
  }
}

const WHY = { nan: "drafts nothing", acceptance: "too little was accepted", error: "it failed" };

function option(draft) {
  const shape = draft.tree ? `tree of ${draft.nodes}` : `up to ${draft.depth} tokens`;
  const off = draft.enabled ? "" : ` \u2013 switched off: ${WHY[draft.reason] ?? draft.reason}`;
  const node = document.createElement("option");
  node.value = draft.name;
  node.textContent = `${draft.name} (${shape})${off}`;
  return node;
}
