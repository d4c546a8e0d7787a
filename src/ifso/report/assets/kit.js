const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
const rect = (x, y, width, height, name, more) => svg('rect', {x, y, width, height, class: name, ...more});
const line = (x1, y1, x2, y2, name, more) => svg('line', {x1, y1, x2, y2, class: name, ...more});
const dot = (cx, cy, r, name) => svg('circle', {cx, cy, r, class: name});
const label = (words, x, y, anchor = 'middle', more = {}) => svg('text', {x, y, 'text-anchor': anchor, ...more}, words);

const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const percent = (share, digits = 1) => in_percent((100 * share).toFixed(digits));
const in_percent = number => `${number}\u00a0%`;
const capital = word => word.slice(1) === word.slice(1).toLowerCase() ? word[0].toUpperCase() + word.slice(1) : word;
const colour = place => 1 + place % 7;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const count = number => Math.round(number).toLocaleString('en');
const isPrinting = () => document.body.classList.contains('printing');

function plain(number) {
  if (number === null || number === undefined) return '–';
  const size = Math.abs(number);
  return size >= 1e5 || (size && size < 1e-3) ? number.toExponential(2) : String(Number(number.toPrecision(4)));
}

/* A count with few letters. */
function amount(number) {
  const found = [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']].find(([size]) => Math.abs(number) >= size);
  return found ? `${Number((number / found[0]).toPrecision(3))} ${found[1]}` : plain(number);
}

/* The title of a vertical axis. */
const sideways = (words, x, y) => label(words, x, y, 'middle', {transform: `rotate(-90 ${x} ${y})`});

function linear(from, to, low, high) {
  const span = to - from || 1;
  return value => low + (value - from) / span * (high - low);
}

/* Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low || 1) / Math.max(count, 1), size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(each => each * size).find(each => each >= raw * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

const tip = {
  node: document.getElementById('tip'),
  show(lines, x, y) {
    const [first, ...others] = lines;
    this.node.replaceChildren(html('b', {}, first), ...others.map(words => html('div', {}, words)));
    this.node.hidden = false;
    this.since = performance.now();
    const box = this.node.getBoundingClientRect(), below = y + 18 + box.height < innerHeight;
    this.node.style.left = `${clamp(x + 14, 8, Math.max(innerWidth - box.width - 8, 8))}px`;
    this.node.style.top = `${below ? y + 18 : Math.max(y - box.height - 12, 8)}px`;
  },
  hide() { this.node.hidden = true; },
  /* Moving the focus scrolls the page, too: what was just shown stays. */
  hideIfOld() { if (performance.now() - this.since > 250) this.hide(); },
};

const SHAPES = {
  box: name => rect(0, 0, 12, 12, name, {rx: 2}),
  line: name => line(0, 6, 12, 6, name, {'stroke-width': 3}),
  error: name => line(6, 0, 6, 12, name),
  tall: name => line(6, 0, 6, 12, name),
  ring: name => dot(6, 6, 4.5, name),
  diamond: name => svg('path', {d: 'M6 0L12 6L6 12L0 6Z', class: name}),
};

/* Small pictures with words: what colours and shapes mean. */
const keys = entries => entries.map(([name, words, shape = 'box']) => html('span', {class: 'key'},
  svg('svg', {width: 12, height: 12, 'aria-hidden': 'true'}, SHAPES[shape](name)), words));

/* Buttons of which one is pressed. */
function choices(words, chosen, choose) {
  const buttons = words.map((word, place) => {
    const button = html('button', {type: 'button', 'aria-pressed': String(place === chosen)}, word);
    button.addEventListener('click', () => choose(place));
    return button;
  });
  return html('span', {class: 'choices', role: 'group'}, ...buttons);
}

/* A picture that can be pointed at and reached by keys. */
const picture = (width, height, words) => svg('svg', {
  width, height, viewBox: `0 0 ${width} ${height}`, class: 'hot', tabindex: 0, role: 'img', 'aria-label': words,
});

/* Pointer and keys pick one of `count` places: `at(x, y)` finds it, `on` has point, leave, where and perhaps pick. */
function picking(node, count, at, on) {
  let current = -1;
  const go = (place, x, y) => { current = clamp(place, 0, count - 1); on.point(current, x, y); };
  const byKey = place => {
    const box = node.getBoundingClientRect(), chosen = clamp(place, 0, count - 1);
    if (on.reveal) on.reveal(chosen);
    go(chosen, box.left + on.where(chosen), box.top + 30);
  };
  const follow = event => {
    const box = node.getBoundingClientRect();
    go(at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  };
  node.addEventListener('pointermove', follow);
  node.addEventListener('pointerdown', follow);
  node.addEventListener('pointerleave', event => { if (event.pointerType !== 'touch') on.leave(); });
  node.addEventListener('blur', () => on.leave());
  node.addEventListener('focus', () => { if (node.matches(':focus-visible')) byKey(Math.max(current, 0)); });
  node.addEventListener('click', () => { if (current >= 0 && on.pick) on.pick(current); });
  node.addEventListener('keydown', event => {
    const moves = {ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: count - 1};
    if (event.key in moves) byKey(moves[event.key]);
    else if ((event.key === 'Enter' || event.key === ' ') && current >= 0 && on.pick) on.pick(current);
    else if (event.key === 'Escape') return on.leave();
    else return;
    event.preventDefault();
  });
}
