"use strict";
// What looking adds to reading: values under the pointer or by the arrow keys, one curve or one seed alone. Without it the page says the same.
(() => {
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const number = v => {
  if (v == null) return "–";
  const size = Math.abs(v);
  if (!size || (size >= 1e-4 && size < 1e5)) return String(+v.toPrecision(3)).replace("-", "−");
  const [digits, power] = v.toExponential(2).split("e");
  return `${+digits}`.replace("-", "−") + " × 10" + [...String(+power)].map(c => RAISED[c] ?? "⁻").join("");
};
const make = (tag, into, text, name) => {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  if (into) into.append(made);
  return made;
};
const at = ([log, low, high, start, end], v) =>
  start + (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low)) * (end - start);
const live = make("div", document.body, "", "unseen");
live.setAttribute("aria-live", "polite");

class Panel {
  constructor(figure, data, box) {
    Object.assign(this, { figure, data, box, svg: box.querySelector("svg.plot"), now: -1 });
    this.groups = [...this.svg.querySelectorAll("g.curve")];
    this.drawn = this.groups.map(group => group.innerHTML);
    this.tip = make("div", box, "", "tip");
    this.tip.hidden = true;
    this.guide = document.createElementNS(this.svg.namespaceURI, "path");
    this.guide.setAttribute("class", "guide");
    this.svg.append(this.guide);
    const title = this.svg.querySelector("title"), told = this.svg.querySelector("desc");
    this.svg.setAttribute("aria-label", title.textContent);
    this.svg.removeAttribute("aria-labelledby");
    this.svg.setAttribute("aria-description", told.textContent);
    this.svg.removeAttribute("aria-describedby");
    // Else the browser's own tip covers this one.
    this.svg.querySelectorAll("title, desc").forEach(one => one.remove());
    if (!this.groups.length) return;
    Object.assign(box, { tabIndex: 0 });
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${title.textContent}: values by the arrow keys`);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerdown", event => this.point(event));
    box.addEventListener("pointerleave", () => this.hide());
    box.addEventListener("blur", () => this.hide());
    box.addEventListener("keydown", event => this.key(event));
  }
  // The numbers of a curve: over all seeds, or of the one that is chosen.
  curve(k) {
    const own = this.data.curves[k], seed = this.figure.seed;
    if (seed < 0 || !own.seeds) return { ...own, x: this.data.xs[own.x] };
    const one = own.seeds[seed];
    return one && { key: own.key, shift: own.shift, x: this.data.xs[one[0]], y: one[1] };
  }
  seen() {
    return this.data.curves.map((_, k) => this.curve(k)).filter(one => one && !this.figure.off.has(one.key));
  }
  stops() {
    const all = this.seen().flatMap(one => one.x.filter((x, i) => x != null && one.y[i] != null));
    return [...new Set(all)].sort((a, b) => a - b);
  }
  point(event) {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    const along = this.data.turned ? place.y : place.x, stops = this.stops();
    if (!stops.length) return this.hide();
    const far = stops.map(x => Math.abs(at(this.data.place, x) - along));
    this.show(stops, far.indexOf(Math.min(...far)), place);
  }
  key(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") return this.hide();
    if (!(event.key in steps)) return;
    event.preventDefault();
    const stops = this.stops();
    if (!stops.length) return;
    const next = this.now < 0 && steps[event.key] === 1 ? 0 : this.now + steps[event.key];
    this.show(stops, Math.max(0, Math.min(stops.length - 1, next)), null);
    live.textContent = this.tip.innerText;
  }
  show(stops, now, place) {
    const { turned, names, size, x: label } = this.data, x = stops[now], spot = at(this.data.place, x);
    this.now = now;
    const [, , , start, end] = this.data.value;
    this.guide.setAttribute("d", turned ? `M${start} ${spot}H${end}` : `M${spot} ${start}V${end}`);
    this.tip.replaceChildren();
    make("strong", this.tip, names.length ? names[x] ?? number(x) : `${label} ${number(x)}`);
    const list = make("ul", this.tip);
    let rest = 0;
    for (const one of this.seen()) {
      const i = one.x.indexOf(x);
      if (i < 0 || one.y[i] == null) continue;
      if (list.childElementCount >= 14) { rest += 1; continue; }
      const item = make("li", list);
      if (this.figure.swatches[one.key]) item.append(this.figure.swatches[one.key].cloneNode(true));
      if (this.figure.labels[one.key] !== names[x]) make("span", item, this.figure.labels[one.key]);
      make("b", item, number(one.y[i]));
      if (one.low && one.low[i] !== one.high[i]) make("small", item, `${number(one.low[i])} to ${number(one.high[i])}`);
    }
    if (rest) make("li", list, `and ${rest} more`);
    this.tip.hidden = false;
    const scale = this.svg.clientWidth / 400, page = document.documentElement.clientWidth, width = this.tip.offsetWidth;
    const from = this.box.getBoundingClientRect().left, wide = (turned ? (place ? place.x : start) : spot) * scale;
    const left = from + wide + 16 + width <= page || from + wide - 16 - width < 0 ? wide + 16 : wide - width - 16;
    this.tip.style.left = `${Math.max(8 - from, Math.min(page - 8 - from - width, left))}px`;
    this.tip.style.top = turned ? `${Math.min(spot + 14, size) * scale}px` : "0";
  }
  hide() {
    this.tip.hidden = true;
    this.guide.removeAttribute("d");
    this.now = -1;
  }
  redraw() {
    this.hide();
    const { turned, place, value } = this.data;
    this.groups.forEach((group, k) => {
      const own = this.data.curves[k];
      group.classList.toggle("off", this.figure.off.has(own.key));
      if (!own.seeds) return;
      group.innerHTML = this.drawn[k];
      group.querySelectorAll("title").forEach(one => one.remove());
      if (this.figure.seed < 0) return;
      const one = this.curve(k), mark = group.querySelector("use"), few = one && one.x.length <= 24;
      group.querySelectorAll(".band, .whisker, use").forEach(part => part.remove());
      const line = group.querySelector(".line"), bars = [...group.querySelectorAll("rect")];
      const spots = !one ? [] : one.x.map((x, i) => x == null || one.y[i] == null ? null
        : [at(place, x + (bars.length ? one.shift || 0 : 0)), at(value, one.y[i])]);
      const [wide, high] = turned ? [1, 0] : [0, 1];
      if (line) {
        let pen = "M";
        line.setAttribute("d", spots.map(spot => {
          if (!spot) { pen = "M"; return ""; }
          const step = `${pen}${spot[wide].toFixed(1)} ${spot[high].toFixed(1)}`;
          pen = "L";
          return step;
        }).join(""));
      }
      if (mark && (few || !line)) for (const spot of spots) if (spot) {
        const copy = mark.cloneNode(true);
        copy.setAttribute("x", spot[wide]);
        copy.setAttribute("y", spot[high]);
        group.append(copy);
      }
      const zero = value[0] ? value[3] : at(value, Math.min(Math.max(0, value[1]), value[2]));
      const shown = spots.filter(Boolean);
      bars.forEach((bar, i) => {
        if (!shown[i]) return bar.remove();
        const [middle, to] = shown[i], thick = +bar.getAttribute(turned ? "height" : "width");
        bar.setAttribute(turned ? "y" : "x", middle - thick / 2);
        bar.setAttribute(turned ? "x" : "y", Math.min(zero, to));
        bar.setAttribute(turned ? "width" : "height", Math.abs(to - zero));
      });
    });
  }
}

class Figure {
  constructor(root, data) {
    Object.assign(this, { root, labels: data.labels, seed: -1, off: new Set() });
    this.swatches = [...root.querySelectorAll(".legend .swatch")];
    const boxes = [...root.querySelectorAll(".box")];
    this.panels = data.panels.map((panel, k) => new Panel(this, panel, boxes[k]));
    this.legend();
    if (data.seeds.length > 1) this.seeds(data.seeds);
  }
  legend() {
    const items = [...this.root.querySelectorAll(".legend li")];
    if (items.length < 2) return;
    items.forEach((item, key) => {
      const button = make("button");
      button.type = "button";
      button.title = "Show or hide this curve";
      button.setAttribute("aria-pressed", "true");
      button.append(...item.childNodes);
      item.append(button);
      button.addEventListener("click", () => {
        const gone = this.off.has(key) ? !this.off.delete(key) : !!this.off.add(key);
        button.setAttribute("aria-pressed", String(!gone));
        this.redraw();
      });
      for (const [event, lit] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]])
        button.addEventListener(event, () => this.light(key, lit));
    });
  }
  light(key, lit) {
    this.root.classList.toggle("lit", lit);
    this.root.querySelectorAll("g.curve").forEach(one => one.classList.toggle("chosen", lit && one.dataset.key == key));
  }
  seeds(seeds) {
    const tools = make("p", null, "", "tools"), label = make("label", tools, "Show "), choice = make("select", label);
    ["all seeds", ...seeds.map(seed => `seed ${seed} alone`)].forEach((text, k) => { make("option", choice, text).value = k - 1; });
    choice.addEventListener("change", () => { this.seed = +choice.value; this.redraw(); });
    this.root.querySelector(".panels").before(tools);
  }
  redraw() { this.panels.forEach(panel => panel.redraw()); }
}

for (const root of document.querySelectorAll("figure")) {
  const source = root.querySelector("script[type='application/json']");
  if (source) new Figure(root, JSON.parse(source.textContent));
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
})();
