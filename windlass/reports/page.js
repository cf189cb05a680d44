"use strict";
// Values under a pointer or by the arrow keys, and a page that follows a run. Charts bring their
// points along: [step, share of the width, share of the height, text].

function near(points, share) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][1] < share) low = middle; else high = middle;
  }
  return share - points[low][1] < points[high][1] - share ? points[low] : points[high];
}

function add(parent, kind, style) {
  const element = document.createElement(kind);
  element.className = style;
  parent.append(element);
  return element;
}

function clear(plot) {
  for (const old of plot.querySelectorAll(".cursor, .dot, .tip")) old.remove();
}

function show(plot, share) {
  clear(plot);
  const curves = JSON.parse(plot.dataset.curves);
  const at = curves.map(curve => near(curve.points, share))
    .reduce((a, b) => Math.abs(a[1] - share) <= Math.abs(b[1] - share) ? a : b);
  add(plot, "div", "cursor").style.left = 100 * at[1] + "%";
  const tip = add(plot, "div", "tip");
  add(tip, "b", "").textContent = "step " + at[0].toLocaleString("en");
  for (const curve of curves) {
    const point = near(curve.points, at[1]);
    const dot = add(plot, "i", "dot " + curve.style);
    dot.style.left = 100 * point[1] + "%";
    dot.style.top = 100 * point[2] + "%";
    const line = add(tip, "div", "");
    add(line, "i", curve.style);
    const step = point[0] === at[0] ? "" : " (step " + point[0].toLocaleString("en") + ")";
    line.append(curve.name + " " + point[3] + step);
  }
  tip.style[at[1] < 0.5 ? "left" : "right"] = "calc(" + 100 * (at[1] < 0.5 ? at[1] : 1 - at[1]) + "% + 10px)";
  plot.setAttribute("aria-valuenow", at[0]);
  plot.setAttribute("aria-valuetext", Array.from(tip.children, one => one.textContent).join(", "));
}

function shareAt(plot, event) {
  const box = plot.getBoundingClientRect();
  return (event.clientX - box.left) / box.width;
}

function moved(plot, key) {
  const steps = new Map();
  for (const curve of JSON.parse(plot.dataset.curves)) {
    for (const point of curve.points) steps.set(point[0], point[1]);
  }
  const shares = Array.from(steps.values()).sort((a, b) => a - b);
  const now = parseInt(plot.getAttribute("aria-valuenow"), 10);
  const place = shares.indexOf(steps.get(now));
  const page = Math.max(1, Math.round(shares.length / 10));
  const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page,
    Home: -shares.length, End: shares.length }[key];
  if (by === undefined) return null;
  return shares[Math.min(shares.length - 1, Math.max(0, place + by))];
}

for (const kind of ["pointermove", "pointerdown"]) {
  document.addEventListener(kind, event => {
    const plot = event.target instanceof Element && event.target.closest(".plot");
    for (const other of document.querySelectorAll(".plot")) {
      if (other !== plot && other !== document.activeElement) clear(other);
    }
    if (plot) show(plot, shareAt(plot, event));
  });
}
document.addEventListener("keydown", event => {
  const plot = event.target instanceof Element && event.target.closest(".plot");
  if (!plot || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape") return clear(plot);
  const share = moved(plot, event.key);
  if (share === null) return;
  event.preventDefault();
  show(plot, share);
});
document.addEventListener("focusout", event => {
  const plot = event.target instanceof Element && event.target.closest(".plot");
  if (plot) clear(plot);
});

// A live page replaces what it shows, and leaves open, chosen and focused what was.
function marks() {
  return Array.from(document.querySelectorAll("main details, main input, main .plot"));
}

function replace(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  const before = marks(), focused = before.indexOf(document.activeElement);
  const shown = before.map(one => one.querySelector && one.querySelector(".tip") ? one.getAttribute("aria-valuenow") : null);
  document.querySelector("main").replaceWith(fresh);
  const after = marks();
  if (after.length !== before.length) return;
  after.forEach((one, i) => {
    if (one.tagName === "DETAILS") one.open = before[i].open;
    if (one.tagName === "INPUT") one.checked = before[i].checked;
    if (shown[i] !== null) {
      const point = JSON.parse(one.dataset.curves).flatMap(curve => curve.points)
        .find(each => each[0] === parseInt(shown[i], 10));
      if (point) show(one, point[1]);
    }
  });
  if (focused >= 0) after[focused].focus({ preventScroll: true });
}

function say(text) {
  const status = document.querySelector(".live");
  if (status.textContent !== text) status.textContent = text;
}

async function look(tag) {
  try {
    const answer = await fetch("/", { headers: tag.value ? { "If-None-Match": tag.value } : {} });
    if (answer.status === 200) {
      tag.value = answer.headers.get("ETag");
      replace(await answer.text());
    }
    say(answer.ok || answer.status === 304 ? "live" : "the run cannot be read now");
  } catch {
    say("not connected: the command that serves this page has ended");
  }
}

if (document.body.dataset.live) {
  const tag = { value: null };
  say("live");
  setInterval(() => document.hidden || look(tag), parseInt(document.body.dataset.live, 10));
}
