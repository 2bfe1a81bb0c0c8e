// The search's worker, as the theme starts it, with three differences.
// Browsers refuse workers to pages from the disk, where a frame takes its place.
const inFrame = (url, answer) => {
  const frame = document.createElement("iframe");
  frame.hidden = true;
  document.body.append(frame);
  const inner = frame.contentWindow, script = inner.document.createElement("script");
  const loaded = new Promise(done => script.addEventListener("load", done)).then(() => inner.eval(mended));
  inner.postMessage = answer;
  script.src = url;
  inner.document.body.append(script);
  return data => loaded.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
};
const Thread = window.Worker;
const inThread = (url, answer) => {
  const thread = new Thread(URL.createObjectURL(new Blob([`importScripts("${new URL(url, location)}");${mended}`])));
  thread.onmessage = ({ data }) => answer(data);
  return data => thread.postMessage(data);
};
// lunr merges nodes of its index whose descriptions are equal. "a1" to node 2 and "a" to node 12 are not, and a search finds words that are not there.
const mended = `lunr.TokenSet.prototype.toString = function () {
  return this._str ?? Object.keys(this.edges).sort().reduce((text, label) => text + label + this.edges[label].id + ",", this.final ? "1" : "0");
};`;
// A hyphen would exclude the word behind it, and each word counts as the beginning of one, "of" too.
const asked = message => typeof message.data !== "string" ? message : { ...message, data: message.data.replace(/(?<=\w)-(?=\w)/g, " ")
  .replace(/\b(an?|and|another|at|by|can|do(es)?|for|how|i[fnst]?|my|o[fnr]|out|the|to|what|which|with)\b/gi, "") };
window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const start = location.protocol === "file:" ? inFrame : inThread;
    this.send = start(url, data => this.dispatchEvent(new MessageEvent("message", { data })));
  }
  postMessage(message) { this.send(asked(message)); }
};
