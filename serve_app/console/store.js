// Stores conversations in this browser (IndexedDB). Notifies other tabs of changes.

const DATABASE = "serve_app";
const STORE = "conversations";

export class StorageFullError extends Error {
  constructor() {
    super("This browser's storage is full: export and delete conversations to keep new ones.");
  }
}

/** The conversations' store, in memory if the browser stores nothing (some private windows). */
export async function openStore() {
  try {
    return new Store(await openDatabase());
  } catch {
    return new MemoryStore();
  }
}

function openDatabase() {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  return answerOf(opening);
}

class Store {
  keeps = true;

  constructor(database) {
    this.database = database;
    this.channel = new BroadcastChannel("serve_app conversations");
  }

  /** Calls `listener` with the id of a conversation that another tab has changed. */
  onChange(listener) {
    this.channel.onmessage = (event) => listener(event.data);
  }

  all() {
    return answerOf(this.database.transaction(STORE).objectStore(STORE).getAll());
  }

  get(id) {
    return answerOf(this.database.transaction(STORE).objectStore(STORE).get(id));
  }

  put(conversation) {
    return this.change(conversation.id, (store) => store.put(conversation));
  }

  delete(id) {
    return this.change(id, (store) => store.delete(id));
  }

  /** Throws StorageFullError. */
  async change(id, act) {
    const transaction = this.database.transaction(STORE, "readwrite");
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    act(transaction.objectStore(STORE));
    try {
      await done;
    } catch (error) {
      throw error?.name === "QuotaExceededError" ? new StorageFullError() : error;
    }
    this.channel.postMessage(id);
  }
}

class MemoryStore {
  keeps = false;
  conversations = new Map();

  onChange() {}

  async all() {
    return [...this.conversations.values()];
  }

  async get(id) {
    return this.conversations.get(id);
  }

  async put(conversation) {
    this.conversations.set(conversation.id, conversation);
  }

  async delete(id) {
    this.conversations.delete(id);
  }
}

function answerOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
