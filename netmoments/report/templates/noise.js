"use strict";
/* The page to play with: one noise level, one class and one order are chosen, and everything is drawn from them.
   All numbers and most words come with the page, in #data; nothing is loaded, and names are only ever set as text. */

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const state = { level: data.chosen, group: 0, sort: "fragile", shown: data.first, open: null };

/* Elements */

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function chart(host, height, title, parts) {
  const width = host.clientWidth;
  const box = { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title };
  host.replaceChildren(drawn("svg", box, ...parts));
  return host.firstChild;
}

const words = (x, y, said, kind = null, anchor = null) => drawn("text", { x, y, class: kind, "text-anchor": anchor }, said);
const upright = (kind, x, top, bottom) => drawn("line", { class: kind, x1: x, x2: x, y1: top, y2: bottom });
const titled = (node, said) => (node.append(drawn("title", {}, said)), node);
const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

/* Scales */

const scale = (low, high, start, end) => (value) => start + ((value - low) / (high - low)) * (end - start);

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 2.5, 5, 10].find((m) => power * m >= least * 0.999);
}

function ticks(low, high, about) {
  const step = roundStep((high - low) / about);
  const places = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k++) places.push(k * step);
  return places;
}

function shareLimits(points) {
  let low = Math.min(...points.map((point) => point.low));
  const high = Math.max(...points.map((point) => point.high));
  if (low < 0.3) low = 0;
  const step = roundStep(Math.max(high - low, 0.01) / 5);
  const top = Math.max(0.01, Math.min(1, step * Math.ceil(high / step - 1e-9)));
  return [Math.min(Math.max(0, step * Math.floor(low / step + 1e-9)), Math.max(0, top - 0.01)), top];
}

const short = (value) => String(Number(value.toPrecision(3)));
const percent = (share) => `${Number((100 * share).toFixed(3))}%`;
const won = (share) => (share === 0 ? "—" : share < 0.001 ? "< 0.1%" : share >= 0.9995 ? "100%" : `${(100 * share).toFixed(1)}%`);

/* What is chosen */

const levelSaid = () => data.levels[state.level].said;
const className = (number) => data.classes[number];
const group = () => data.groups[state.group];
const plural = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

function chosenImages() {
  const ranked = data.ranking[state.level].map((place) => ({ place, image: data.images[place] }));
  const mine = ranked.filter(({ image }) => state.group === 0 || image.group === state.group);
  if (state.sort === "robust") mine.reverse();
  if (state.sort === "name") mine.sort((a, b) => a.image.name.localeCompare(b.image.name, "en", { numeric: true }));
  if (state.sort === "class") mine.sort((a, b) => a.image.group - b.image.group);
  return mine;
}

/* Charts */

function lineWithBand(x, y, points, kind, which = data.levels) {
  const line = points.map((point, k) => [x(which[k].x), y(point.share)]);
  const edge = points.map((point, k) => [x(which[k].x), y(point.high)]);
  const other = points.map((point, k) => [x(which[k].x), y(point.low)]).reverse();
  return [
    drawn("path", { class: `band${kind}`, d: `${path([...edge, ...other])}Z` }),
    drawn("path", { class: `line${kind}`, d: path(line) }),
  ];
}

function overNoise(host, height, title, points, limits, behind) {
  const width = host.clientWidth;
  const last = data.levels[data.levels.length - 1].x;
  const x = scale(0, last, 54, width - 16);
  const y = scale(limits[0], limits[1], height - 48, 14);
  const parts = [];
  for (const tick of ticks(limits[0], limits[1], height > 200 ? 5 : 3)) {
    parts.push(drawn("line", { class: "grid", x1: 54, x2: width - 16, y1: y(tick), y2: y(tick) }));
    parts.push(words(46, y(tick) + 4, percent(tick), null, "end"));
  }
  for (const tick of ticks(0, last, width > 520 ? 6 : 4)) parts.push(words(x(tick), height - 31, short(tick), null, "middle"));
  parts.push(words(width - 16, height - 12, data.noise, null, "end"));
  const here = data.levels[state.level].x;
  parts.push(upright("chosen", x(here), 14, height - 48));
  if (behind) parts.push(...lineWithBand(x, y, behind, " behind"));
  parts.push(...lineWithBand(x, y, points, ""));
  points.forEach((point, k) => {
    const mark = { class: k === state.level ? "dot now" : "dot", cx: x(data.levels[k].x), cy: y(point.share), r: k === state.level ? 6 : 3.5 };
    parts.push(titled(drawn("circle", mark), `${point.said} at ${data.levels[k].said}`));
  });
  const right = x(here) > 0.6 * width;
  const high = points[state.level].share > (limits[0] + limits[1]) / 2;
  parts.push(words(x(here) + (right ? -8 : 8), high ? height - 56 : 26, levelSaid(), "note", right ? "end" : null));
  const svg = chart(host, height, title, parts);
  svg.addEventListener("click", (event) => {
    const place = event.clientX - svg.getBoundingClientRect().left;
    const away = data.levels.map((level) => Math.abs(x(level.x) - place));
    choose({ level: away.indexOf(Math.min(...away)) });
  });
}

function drawCurve() {
  const behind = state.group === 0 ? null : data.groups[0].points;
  const limits = shareLimits(behind ? [...behind, ...group().points] : group().points);
  const points = group().points.map((point) => ({ ...point, said: `${point.said} ${data.kept}, ${point.band}` }));
  const host = at("curve");
  overNoise(host, Math.round(130 + 0.24 * host.clientWidth), `${data.answers} over noise, ${group().name}`, points, limits, behind);
  at("curve-of").textContent = behind ? `over the images of ${group().name}, and grey over all images` : "over all images";
  at("curve-begins").textContent = limits[0] > 0 ? ` The scale begins at ${percent(limits[0])}, not at 0, to show what changes.` : "";
}

const RAREST = -12;
const NAMED = { 0: "always", "-3": "1 in 1,000", "-6": "1 in a million", "-9": "1 in a billion", "-12": "1 in a trillion" };
const log = (value) => (value > 0 ? Math.max(RAREST, Math.log10(value)) : RAREST);

function stacked(x, seen, radius) {
  const free = [];
  const slots = seen.map(({ now }) => {
    const place = x(log(now.flip));
    let slot = free.findIndex((end) => end <= place);
    if (slot < 0) slot = free.length;
    free[slot] = place + 2 * radius;
    return slot;
  });
  const pitch = Math.min(2 * radius + 1, 220 / Math.max(free.length, 1));
  const base = 14 + radius + pitch * Math.max(free.length, 1);
  return { slots, pitch, base };
}

function opener(node, place) {
  node.addEventListener("click", () => open(place));
  node.classList.add("opens");
  return node;
}

function drawStrip() {
  const host = at("strip");
  const width = host.clientWidth;
  const x = scale(RAREST, 0, 14, width - 14);
  if (state.level === 0) {
    chart(host, 44, "without noise no answer changes", [words(14, 26, "Without noise no answer changes.", "note")]);
    return;
  }
  const mine = chosenImages().map(({ place, image }) => ({ place, image, now: image.levels[state.level] }));
  const seen = mine.filter(({ now }) => now.flip > 0).sort((a, b) => a.now.flip - b.now.flip);
  const unseen = mine.filter(({ now }) => now.flip === 0);
  const radius = width > 520 ? 3.4 : 3;
  const { slots, pitch, base } = stacked(x, seen, radius);
  const marks = [];
  seen.forEach(({ place, image, now }, k) => {
    const y = base - radius - pitch * slots[k];
    const wrong = image.wrong ? " wrong" : "";
    marks.push(drawn("line", { class: `interval${wrong}`, x1: x(log(now.low)), x2: x(log(now.high)), y1: y, y2: y }));
    const dot = drawn("circle", { class: `dot${wrong}`, cx: x(log(now.flip)), cy: y, r: radius });
    marks.push(opener(titled(dot, `${image.name}: ${now.said}, ${now.known}`), place));
  });
  let end = base + 10;
  for (const [bound, some] of boundGroups(unseen)) {
    const edge = x(log(bound));
    const columns = Math.max(1, Math.min(24, Math.floor((edge - 14) / 14)));
    const said = `${plural(some.length, "image")}: ${some.find(({ now }) => now.high === bound).now.said}`;
    const fits = edge - 14 > 7.5 * said.length;
    marks.push(words(fits ? edge : 14, end + 12, said, "note", fits ? "end" : null));
    const rows = Math.ceil(some.length / columns);
    marks.push(upright("bound", edge, end + 18, end + 20 + 7 * rows));
    some.forEach(({ place, image, now }, k) => {
      const right = edge - 2 - 7 * (k % columns);
      const middle = end + 18 + 7 * (Math.floor(k / columns) + 0.5);
      const mark = drawn("path", { class: `below${image.wrong ? " wrong" : ""}`, d: `M${right} ${middle - 2.6}v5.2l-4.6 -2.6z` });
      marks.push(opener(titled(mark, `${image.name}: ${now.said}, ${now.known}`), place));
    });
    const tail = edge - 8 - 7 * Math.min(columns, some.length);
    const half = end + 18 + 3.5 * rows;
    if (tail > 38) marks.push(drawn("path", { class: "arrow", d: `M${tail} ${half}H14m6 -4l-6 4l6 4` }));
    end += 26 + 7 * rows;
  }
  const roomy = width > 640;
  const grid = [];
  for (let power = RAREST; power <= 0; power += roomy ? 1 : 3) {
    const anchor = power === 0 ? "end" : power === RAREST ? "start" : "middle";
    grid.push(upright("grid", x(power), 14, end));
    grid.push(words(x(power), end + 17, power < -3 ? `1e${power}` : String(10 ** power), null, anchor));
    if (NAMED[power] && (roomy || power % 6 === 0)) grid.push(words(x(power), end + 35, NAMED[power], null, anchor));
  }
  chart(host, end + 48, `how often each image flips at ${levelSaid()}`, [...grid, ...marks]);
}

function boundGroups(unseen) {
  for (const key of [(now) => now.said, (now) => String(Math.ceil(log(now.high)))]) {
    const groups = new Map();
    for (const item of unseen) groups.set(key(item.now), [...(groups.get(key(item.now)) || []), item]);
    const found = [...groups.values()].map((some) => [Math.max(...some.map(({ now }) => now.high)), some]);
    if (found.length <= 4) return found.sort((a, b) => b[0] - a[0]);
  }
  return unseen.length ? [[Math.max(...unseen.map(({ now }) => now.high)), unseen]] : [];
}

function drawScores(host, image) {
  const now = image.levels[state.level];
  const width = host.clientWidth;
  const row = 26;
  const longest = width > 500 ? 20 : 13;
  const names = image.outputs.map(className).map((name) => (name.length > longest ? `${name.slice(0, longest - 1)}…` : name));
  const every = image.levels.flatMap((level) => level.mean.map((mean, k) => [mean - 2.2 * level.deviation[k], mean + 2.2 * level.deviation[k]]));
  const low = Math.min(...every.map(([start]) => start));
  const high = Math.max(...every.map(([, end]) => end));
  const left = Math.max(28, 16 + 8 * Math.max(...names.map((name) => name.length)));
  const x = scale(low, high > low ? high : low + 1, left, width - 60);
  const bottom = 26 + row * names.length;
  const parts = [words(width - 2, 16, "won", null, "end"), words(width - 60, bottom + 36, "score", null, "end")];
  for (const tick of ticks(low, high > low ? high : low + 1, width > 500 ? 6 : 4)) {
    parts.push(upright("grid", x(tick), 26, bottom), words(x(tick), bottom + 17, short(tick), null, "middle"));
  }
  image.outputs.forEach((number, k) => {
    const y = 26 + row * (k + 0.5);
    const kind = number === image.answer ? "name answer" : "name";
    const [mean, deviation] = [now.mean[k], now.deviation[k]];
    const said = `${className(number)}: mean ${short(mean)}, standard deviation ${short(deviation)}`;
    parts.push(words(left - 8, y + 4, names[k], kind, "end"), words(width - 2, y + 4, won(now.won[k]), kind, "end"));
    for (const [reach, thick] of [[2, "bar"], [1, "bar inner"]]) {
      const ends = { x1: x(mean - reach * deviation), x2: x(mean + reach * deviation), y1: y, y2: y };
      parts.push(titled(drawn("line", { class: thick, ...ends }), said));
    }
    parts.push(titled(drawn("circle", { class: "dot", cx: x(mean), cy: y, r: 3.5 }), said));
  });
  chart(host, bottom + 44, `scores of ${image.name} at ${levelSaid()}`, parts);
}

/* Noisy copies: the same numbers as `drawn_noise` has in Python, so that the answers are those to these very copies */

function hash32(x) {
  x = (x + 0x9e3779b9) | 0;
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

function normal(stream, place) {
  const [u, v] = [hash32((2 * place) ^ stream), hash32((2 * place + 1) ^ stream)].map((bits) => (bits + 0.5) / 2 ** 32);
  return Math.sqrt(-2 * Math.log(u)) * Math.cos(2 * Math.PI * v);
}

function noisyCopy(picture, image, copy, sigma) {
  const [width, height] = [picture.naturalWidth, picture.naturalHeight];
  const canvas = element("canvas", { width, height, role: "img" });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  const pixels = context.getImageData(0, 0, width, height);
  const stream = hash32(image.number * data.copies + copy);
  const area = width * height;
  for (let place = 0; place < area; place++) {
    for (let channel = 0; channel < 3; channel++) {
      const plane = data.channels === 1 ? 0 : channel;
      const value = pixels.data[4 * place + channel] + 255 * sigma * normal(stream, plane * area + place);
      pixels.data[4 * place + channel] = Math.round(Math.min(255, Math.max(0, value)));
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function copyFigure(picture, image, copy, level) {
  const canvas = noisyCopy(picture, image, copy, data.levels[level].sigma);
  const answer = image.copies ? image.copies[level][copy] : null;
  const said = answer === null ? "" : className(answer);
  canvas.setAttribute("aria-label", said ? `noisy copy ${copy + 1}, taken for ${said}` : `noisy copy ${copy + 1}`);
  const caption = said ? element("span", { class: answer === image.answer ? null : "wrong" }, said) : null;
  return element("div", {}, canvas, caption);
}

function storedCopies(image) {
  return image.stored.map(([picture, answer], copy) =>
    element("div", {}, element("img", { src: picture, alt: `noisy copy ${copy + 1}` }),
      element("span", { class: answer === image.answer ? null : "wrong" }, className(answer))));
}

/* The image that was clicked on */

function drawPanel() {
  const image = data.images[state.open];
  const now = image.levels[state.level];
  at("panel-name").textContent = image.name;
  at("panel-level").value = state.level;
  at("panel-level").setAttribute("aria-valuetext", levelSaid());
  at("panel-level-said").textContent = levelSaid();
  const picture = at("panel-picture");
  picture.alt = image.name;
  if (picture.getAttribute("src") !== image.picture) picture.src = image.picture;
  const label = image.label === null ? "" : `, label ${className(image.label)}`;
  at("panel-answer").textContent = `Answer without noise: ${className(image.answer)}${label}.`;
  at("panel-answer").className = image.wrong ? "wrong" : "";
  at("panel-flip").textContent = now.said;
  at("panel-known").textContent = now.known;
  at("panel-to").textContent = flipsTo(now);
  at("panel-nearest-said").textContent = nearestSaid(image);
  overNoise(at("panel-flips"), 190, `how often ${image.name} flips over noise`, image.levels.map((level) =>
    ({ share: level.flip, low: level.low, high: level.high, said: `${level.said}, ${level.known}` })), [0, 1], null);
  drawScores(at("panel-scores"), image);
  drawFlipped(image);
  drawAttack(image);
  const drawing = state.open;
  picture.decode().then(() => { if (state.open === drawing) drawCopies(picture, image); }, () => {});
  const places = chosenImages().map(({ place }) => place);
  const here = places.indexOf(state.open);
  at("panel-before").disabled = here <= 0;
  at("panel-after").disabled = here < 0 || here === places.length - 1;
}

function flipsTo(now) {
  return now.flip > 0 ? `flips to ${className(now.to)}` : state.level === 0 ? "" : "no flip seen";
}

function nearestSaid(image) {
  if (image.nearest) return flippedSaid(image.nearest);
  const first = image.levels.findIndex((level) => level.flip > 0);
  const ahead = image.levels[data.chosen].lead;
  const lead = ahead > 0 ? ` At ${data.levels[data.chosen].said} its answer is ${short(ahead)} standard deviations ahead of the next.` : "";
  if (first < 0) return `Up to ${data.levels[data.levels.length - 1].said}, no sample flipped it.${lead}`;
  const { said, to } = image.levels[first];
  return `The least of these noise levels that flips it is ${data.levels[first].said}: with probability ${said}, to ${className(to)}.${lead}`;
}

function flippedSaid(nearest) {
  const level = state.level === 0 ? data.chosen : state.level;
  const away = (nearest.distance * data.levels[data.chosen].x) / data.levels[level].x;
  return `The smallest change found that makes it ${className(nearest.to)} is ${Number(away.toPrecision(2))} standard deviations of the noise away at ${data.levels[level].said}, ${nearest.largest}.`;
}

function drawFlipped(image) {
  at("panel-flipped").hidden = !image.nearest;
  if (!image.nearest) return;
  at("panel-flipped-picture").src = image.nearest.picture;
  at("panel-flipped-picture").alt = `${image.name} with the smallest change found, taken for ${className(image.nearest.to)}`;
  at("panel-flipped-over").src = image.nearest.over;
  at("panel-flipped-over").alt = `that change over ${image.name}`;
  at("panel-flipped-to").textContent = className(image.nearest.to);
}

function drawCopies(picture, image) {
  const host = at("panel-copies");
  const nearest = at("panel-nearest");
  nearest.replaceChildren();
  if (data.drawn) {
    const copies = Array.from({ length: data.copies }, (_, copy) => copyFigure(picture, image, copy, state.level));
    host.replaceChildren(...copies);
    const level = image.copies ? image.copies.findIndex((answers) => answers.some((answer) => answer !== image.answer)) : -1;
    if (level > 0 && !image.nearest) {
      const copy = image.copies[level].findIndex((answer) => answer !== image.answer);
      nearest.append(copyFigure(picture, image, copy, level), element("p", { class: "soft" }, `one of its noisy copies, at ${data.levels[level].said}`));
    }
  } else {
    host.replaceChildren(...(image.stored ? storedCopies(image) : []));
  }
  at("panel-copies-part").hidden = host.childElementCount === 0;
  at("panel-copies-said").textContent = copiesSaid(image);
}

function copiesSaid(image) {
  if (!data.drawn) return `At ${data.levels[data.chosen].said}, with what the network takes them for.`;
  if (image.copies) return `At ${levelSaid()}, with what the network takes them for.`;
  return `At ${levelSaid()}, drawn on the small picture; the network was not asked about these.`;
}

function drawAttack(image) {
  if (at("panel-attack")) at("panel-attack").hidden = !image.attack;
  if (!image.attack) return;
  at("panel-attack-picture").src = image.attack.over;
  at("panel-attack-picture").alt = `the mean of the noise over ${image.name}`;
  at("panel-attack-noisy").src = image.attack.noisy;
  at("panel-attack-noisy").alt = `one noisy copy, taken for ${image.attack.taken}`;
  at("panel-attack-taken").textContent = image.attack.taken;
  at("panel-attack-said").textContent = image.attack.verdict;
  const facts = image.attack.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  at("panel-attack-facts").replaceChildren(...facts);
}

function open(place) {
  state.open = place;
  const panel = at("panel");
  if (!panel.open) panel.showModal();
  drawPanel();
  panel.scrollTop = 0;
}

function step(by) {
  const places = chosenImages().map(({ place }) => place);
  const next = places[places.indexOf(state.open) + by];
  if (next !== undefined) open(next);
}

/* The page */

function card({ place, image }) {
  const now = image.levels[state.level];
  const answer = `answer ${className(image.answer)}${image.label === null ? "" : `, label ${className(image.label)}`}`;
  const button = element("button", { type: "button", class: "card pick", "aria-haspopup": "dialog", "data-place": place },
    element("img", { src: image.picture, alt: "" }),
    element("span", { class: "caption" }, element("b", {}, now.said), element("span", { class: "soft" }, now.known),
      element("span", { class: "clamp" }, flipsTo(now)), element("span", { class: image.wrong ? "clamp wrong" : "clamp" }, answer),
      element("span", { class: "clamp soft" }, image.name)));
  button.addEventListener("click", () => open(place));
  return element("li", {}, button);
}

function drawRanking() {
  const mine = chosenImages();
  at("ranking").replaceChildren(...mine.slice(0, state.shown).map(card));
  const shown = Math.min(state.shown, mine.length);
  at("more").hidden = shown === mine.length;
  at("more").textContent = `Show ${Math.min(data.first, mine.length - shown)} more of ${mine.length.toLocaleString("en")}`;
}

function drawFacts() {
  const point = group().points[state.level];
  const of = state.group === 0 ? "" : ` of ${group().name}`;
  const facts = {
    share: [point.said, state.level === 0 ? `${data.kept} without noise${of}` : `${data.kept} at ${levelSaid()}${of}, ${point.band}`],
    fragile: [point.fragile, `images${of} flip more than one time in ten`],
    robust: [point.never.toLocaleString("en"), `images${of} were never seen to flip${point.below && state.level ? `: each below ${point.below}` : ""}`],
  };
  for (const [name, [value, meaning]] of Object.entries(facts)) {
    const [number, text] = at(`fact-${name}`).children;
    number.textContent = value;
    text.textContent = meaning;
  }
  for (const place of document.querySelectorAll(".noise-said")) place.textContent = state.level === 0 ? "no noise" : levelSaid();
  at("level-said").textContent = levelSaid();
  at("level").value = state.level;
  at("level").setAttribute("aria-valuetext", levelSaid());
  at("said").textContent = `${levelSaid()}, ${group().name}: ${point.said} ${data.kept}`;
  at("strip-said").textContent = `${point.never.toLocaleString("en")} of ${group().count.toLocaleString("en")} were never seen to flip.`;
}

function draw() {
  drawFacts();
  drawCurve();
  drawStrip();
  drawRanking();
  if (state.open !== null) drawPanel();
}

function choose(change) {
  Object.assign(state, change);
  draw();
}

function start() {
  for (const [k, item] of data.groups.entries()) at("class").append(element("option", { value: k }, `${item.name} (${item.count.toLocaleString("en")})`));
  for (const id of ["level", "panel-level"]) {
    at(id).max = data.levels.length - 1;
    at(id).addEventListener("input", (event) => choose({ level: Number(event.target.value) }));
  }
  at("class").addEventListener("change", (event) => choose({ group: Number(event.target.value), shown: data.first }));
  at("sort").addEventListener("change", (event) => choose({ sort: event.target.value, shown: data.first }));
  at("more").addEventListener("click", () => {
    const before = at("ranking").childElementCount;
    choose({ shown: state.shown + data.first });
    at("ranking").children[before].firstChild.focus();
  });
  at("panel-close").addEventListener("click", () => at("panel").close());
  at("panel-before").addEventListener("click", () => step(-1));
  at("panel-after").addEventListener("click", () => step(1));
  at("panel").addEventListener("close", () => {
    const opener = document.querySelector(`[data-place="${state.open}"]`);
    state.open = null;
    if (opener) opener.focus();
  });
  at("panel").addEventListener("click", (event) => { if (event.target === at("panel")) at("panel").close(); });
  at("panel").addEventListener("keydown", (event) => {
    if (event.target.type === "range" || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  document.documentElement.classList.add("plays");
  let width = 0;
  new ResizeObserver(() => {
    if (width !== document.documentElement.clientWidth) {
      width = document.documentElement.clientWidth;
      draw();
    }
  }).observe(document.documentElement);
  draw();
}

start();
