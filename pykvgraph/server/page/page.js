// Asks /cells twice a second and draws what it says; says what is typed to /v1/chat/completions.
"use strict";

const HELD = -2, SHARED = -3; // who has a place of the cache, as /cells tells it; -1: nobody
const IS_HELD = 1, IS_PENDING = 2, IS_WAITING = 4; // marks
const POLL_MS = 500, RETRY_MS = 2000;
const HEIGHT = 300; // of a group of cells, in pixels, as far as cells stay large enough to be seen

const POINT = "Point at a cell to see who has it.";

const byId = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---- the key

let key = sessionStorage.getItem("key") ?? "";

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function askForKey() {
  const form = byId("ask-key");
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
}

byId("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("key", key);
  byId("ask-key").hidden = true;
  poll();
});

// ---- what /cells tells

let told = null; // the last answer
let tried = 0; // the timer of the next question
const speeds = []; // [seconds, tokens decoded] of the last seconds

async function poll() {
  clearTimeout(tried);
  let wait = RETRY_MS;
  try {
    const reply = await fetch("cells", { headers: headers(), signal: AbortSignal.timeout(15000) });
    if (reply.ok) {
      show(await reply.json());
      wait = POLL_MS;
    } else if (reply.status === 401) {
      state(key ? "the key is refused" : "needs a key");
      askForKey();
      return;
    } else {
      const { error } = await reply.json();
      state(error.message);
    }
  } catch {
    state("no answer from the server");
  }
  if (!document.hidden) tried = setTimeout(poll, wait);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("ask-key").hidden) poll();
});

function state(text) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text;
  place.className = text === "live" ? "live" : "";
}

function show(news) {
  told = news;
  state("live");
  byId("model").textContent = news.model;
  showNumbers(news);
  showGroups(news);
  showLegend(news);
  showRequests(news);
}

function showNumbers(news) {
  if (speeds.length && news.decoded_tokens < speeds.at(-1)[1]) speeds.length = 0; // another server
  if (!speeds.length || news.seconds > speeds.at(-1)[0]) speeds.push([news.seconds, news.decoded_tokens]);
  while (speeds.length > 2 && news.seconds - speeds[0][0] > 3) speeds.shift();
  const [[from, before], [to, now]] = [speeds[0], speeds.at(-1)];
  byId("speed").textContent = to > from ? count(Math.round((now - before) / (to - from))) : "–";
  byId("n-running").textContent = count(news.n_running);
  byId("n-waiting").textContent = count(news.n_waiting);
  byId("hits").textContent = percent(news.prefix_hit_tokens, news.prompt_tokens);
  byId("hits-of").textContent = `of ${count(news.prompt_tokens)}`;
  showDrafts(news);
  const first = news.groups[0];
  byId("used").textContent = percent(first.n_used, first.n_cells);
  byId("used-of").textContent = `of ${count(first.n_cells)}`;
}

function showDrafts(news) {
  const refused = Object.entries(news.drafts_refused).filter(([, n]) => n);
  byId("drafts").hidden = !news.drafted && !refused.length;
  byId("held").textContent = percent(news.accepted, news.drafted);
  const steps = refused.reduce((sum, [, n]) => sum + n, 0);
  const reasons = refused.map(([reason, n]) => `${reason} ${count(n)}`).join(", ");
  byId("held-of").textContent = `of ${count(news.drafted)}` + (steps ? `; refused in ${plural(steps, "step")}: ${reasons}` : "");
}

// ---- cells

function colorOf(who) {
  if (who === HELD) return [theme("--held"), theme("--on-held")];
  if (who === SHARED) return told.colors.shared;
  return told.colors.sequences[who % told.colors.sequences.length];
}

function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

function letterOf(who) {
  return told.running.find((text) => text.seq === who)?.letter ?? "";
}

function title(group) {
  if (group.kind === "state") return "states";
  return group.window ? `cells of layers with a window of ${group.window}` : "cells";
}

function describe(group) {
  const parts = [`${count(group.n_used)} of ${plural(group.n_cells, group.kind === "state" ? "row" : "cell")} in use`];
  const more = {
    shared: group.n_shared,
    "only held": group.n_only_held,
    "K-shift pending": group.n_shifts_pending,
    "K-shift waiting": group.n_shifts_waiting,
  };
  for (const [word, n] of Object.entries(more)) if (n) parts.push(`${count(n)} ${word}`);
  if (group.n_holes) parts.push(plural(group.n_holes, "hole"));
  return parts.join(", ");
}

function showGroups(news) {
  const place = byId("groups");
  if (place.children.length !== news.groups.length) {
    place.replaceChildren(...news.groups.map((_, index) => newFigure(index)));
    byId("pointed").textContent = POINT;
  }
  news.groups.forEach((group, index) => {
    const figure = place.children[index];
    const text = `${title(group)}: ${describe(group)}`;
    const each = group.cells_of_a_place;
    figure.lastChild.textContent = each > 1 ? `${text}; a square is ${each} cells` : text;
    figure.firstChild.setAttribute("aria-label", text);
    draw(figure.firstChild, group);
  });
}

function newFigure(index) {
  const figure = element("figure"), canvas = element("canvas");
  canvas.setAttribute("role", "img");
  canvas.addEventListener("pointermove", (event) => point(canvas, index, event));
  canvas.addEventListener("pointerdown", (event) => point(canvas, index, event));
  canvas.addEventListener("pointerleave", () => (byId("pointed").textContent = POINT));
  figure.append(canvas, element("figcaption"));
  return figure;
}

// How large a place is, and how many are in a row.
function layout(canvas, group) {
  const n = Math.ceil(group.n_cells / group.cells_of_a_place);
  const width = Math.max(canvas.clientWidth, 100);
  const size = Math.min(Math.max(Math.floor(Math.sqrt((width * HEIGHT) / Math.max(n, 1))), 4), 18);
  const columns = Math.max(Math.floor(width / size), 1);
  return { size, columns, rows: Math.max(Math.ceil(n / columns), 1), width };
}

function draw(canvas, group) {
  const { size, columns, rows, width } = layout(canvas, group);
  const ratio = window.devicePixelRatio || 1;
  const empty = theme("--empty");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * size * ratio);
  canvas.style.height = `${rows * size}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = `600 ${Math.round(size * 0.62)}px ui-monospace, monospace`;
  let place = 0;
  for (let i = 0; i < group.runs.length; i += 3) {
    const [n, who, marks] = group.runs.slice(i, i + 3);
    const [color, ink] = who === -1 ? [empty, empty] : colorOf(who);
    const name = size >= 12 ? nameOf(who) : "";
    for (const end = place + n; place < end; place++) {
      const x = (place % columns) * size, y = Math.floor(place / columns) * size;
      drawPlace(pen, x, y, size, color, ink, name, marks);
    }
  }
}

function nameOf(who) {
  return who === HELD ? "+" : who === SHARED ? "*" : who < 0 ? "" : letterOf(who);
}

function drawPlace(pen, x, y, size, color, ink, name, marks) {
  const inner = size - 1;
  pen.fillStyle = color;
  pen.fillRect(x, y, inner, inner);
  pen.fillStyle = ink;
  if (name) pen.fillText(name, x + inner / 2, y + inner / 2 + 0.5);
  if (marks & (IS_PENDING | IS_WAITING)) {
    // a corner: filled where the K-shift is pending, its edge alone where it waits
    const corner = Math.max(Math.floor(size / 2.5), 2);
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + corner, y);
    pen.lineTo(x, y + corner);
    pen.closePath();
    pen.strokeStyle = ink;
    if (marks & IS_PENDING) pen.fill();
    else pen.stroke();
  }
}

function point(canvas, index, event) {
  const group = told?.groups[index];
  if (!group) return;
  const { size, columns } = layout(canvas, group);
  const place = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  const each = group.cells_of_a_place;
  if (event.offsetX >= columns * size || place * each >= group.n_cells) return;
  let end = 0, i = 0;
  while (end + group.runs[i] <= place) {
    end += group.runs[i];
    i += 3;
  }
  const first = place * each, last = Math.min(first + each, group.n_cells) - 1;
  const where = each > 1 ? `cells ${first} to ${last}` : `cell ${first}`;
  byId("pointed").textContent = `${where}: ${whoSays(group.runs[i + 1], group.runs[i + 2])}`;
}

function whoSays(who, marks) {
  const says = [];
  const text = told.running.find((each) => each.seq === who);
  if (who === HELD) says.push("only held, as what a text may begin with");
  else if (who === SHARED) says.push("shared by several sequences");
  else if (who < 0) says.push("empty");
  else says.push(text ? `request ${text.request}, sequence ${who}` : `sequence ${who}`);
  if (who !== HELD && marks & IS_HELD) says.push("held for others, too");
  if (marks & IS_PENDING) says.push("K-shift pending");
  if (marks & IS_WAITING) says.push("K-shift waiting");
  return says.join("; ");
}

function chip(color, name) {
  const made = element("span", name, "chip");
  made.style.background = color[0];
  made.style.color = color[1];
  return made;
}

function showLegend(news) {
  if (byId("legend").children.length) return;
  const entries = [
    [element("span", ".", "chip empty"), "empty"],
    [element("span", "+", "chip held"), "only held: what a text may begin with"],
    [chip(news.colors.shared, "*"), "shared by several sequences"],
    [chip(news.colors.sequences[0], "a"), "one sequence's: its letter and colour"],
    [element("span", "◤", "chip empty"), "K-shift pending"],
    [element("span", "◸", "chip empty"), "K-shift waiting"],
  ];
  for (const [sign, text] of entries) {
    const item = element("li");
    item.append(sign, text);
    byId("legend").append(item);
  }
}

// ---- requests

function showRequests(news) {
  const rows = [...news.running, ...news.waiting].map((text) => row(text));
  const n_more = news.n_waiting - news.waiting.length;
  if (n_more > 0) {
    const cell = element("td", `${count(n_more)} more wait`);
    cell.colSpan = 8;
    const last = element("tr");
    last.append(cell);
    rows.push(last);
  }
  byId("rows").replaceChildren(...rows);
  byId("nobody").hidden = rows.length > 0;
}

function row(text) {
  const made = element("tr"), runs = text.seq >= 0;
  const name = element("th", "", "name");
  name.scope = "row";
  if (runs) name.append(chip(colorOf(text.seq), text.letter), " ");
  name.append(String(text.request) + (text.sample ? `.${text.sample}` : "") + (text.n_texts > 1 ? ` ×${text.n_texts}` : ""));
  made.append(name, element("td", phase(text)));
  const numbers = [
    count(text.n_prompt),
    text.n_cached < 0 ? "" : count(text.n_cached),
    count(text.n_said),
    runs ? count(text.n_cells) : "",
    runs ? count(text.n_shared) : "",
    age(text.seconds),
  ];
  for (const number of numbers) made.append(element("td", number, "number"));
  return made;
}

function phase(text) {
  if (text.status === "waiting" && text.n_cached >= 0) return "waiting again";
  if (text.status === "prefill") return `prefill, ${percent(text.n_decoded, text.n_prompt + text.n_said)}`;
  return text.status;
}

function age(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

// ---- chat

const messages = [];
let talking = null; // ends the answer that comes

byId("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || talking) return;
  byId("message").value = "";
  messages.push({ role: "user", content: text });
  said("user", "You").append(text);
  answer();
});

byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("say").requestSubmit();
});

byId("stop").addEventListener("click", () => talking?.abort());

byId("forget").addEventListener("click", () => {
  talking?.abort();
  talking = null;
  busy(false);
  messages.length = 0;
  byId("talk").replaceChildren();
  byId("message").focus();
});

function said(className, name) {
  const made = element("article", "", className);
  made.append(element("h3", name));
  byId("talk").append(made);
  made.scrollIntoView({ block: "end" });
  return made;
}

async function answer() {
  const own = (talking = new AbortController());
  const box = said("assistant", "Model"), text = document.createTextNode("");
  let content = "";
  const thoughts = element("details"), thought = document.createTextNode("");
  thoughts.append(element("summary", "thoughts"), thought);
  box.append(text);
  busy(true);
  try {
    for await (const delta of deltas(own.signal)) {
      if (delta.reasoning_content) {
        if (!thoughts.isConnected) text.before(thoughts);
        thought.data += delta.reasoning_content;
      }
      content += delta.content ?? "";
      text.data = content.trimStart();
      followed(box);
    }
  } catch (error) {
    if (!content) box.remove();
    if (error.name !== "AbortError" && talking === own) said("error", "Error").append(error.message);
  }
  if (talking !== own) return; // another chat has begun
  if (content) messages.push({ role: "assistant", content });
  else messages.pop();
  talking = null;
  busy(false);
}

// The end of the talk stays in sight, unless somebody has scrolled away from it.
function followed(box) {
  const talk = byId("talk");
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80) box.scrollIntoView({ block: "end" });
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  byId("talk").setAttribute("aria-busy", String(is));
}

// What a stream of events adds to the message, piece by piece.
async function* deltas(signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ messages, stream: true }),
    signal,
  });
  if (reply.status === 401) askForKey();
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      if (event.choices.length) yield event.choices[0].delta;
    }
  }
}

window.addEventListener("resize", () => told && showGroups(told));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => told && showGroups(told));
poll();
