const CHARTS = {
  layers: drawLayers, scores: drawScores, order: drawOrder, costs: drawCosts, loss: drawLoss, stages: drawStages,
  epochs: drawEpochs, training: drawTraining, quality: (view, place) => drawQuality(place, [view.run]),
};
const THEMES = {auto: 'as the system has them', light: 'light', dark: 'dark'};

/* One run on the page: what is picked there, and which charts light it up. */
class RunView {
  constructor(article) {
    this.article = article;
    this.run = DATA.runs[Number(article.dataset.run)];
    this.pinned = null;
    this.measure = 0;
    this.lights = new Map();
  }
  light(groups) { for (const light of this.lights.values()) light(groups); }
  pin(group) {
    this.pinned = group === undefined ? null : group;
    drawDetail(this);
    this.light(this.pinned === null ? [] : [this.pinned]);
  }
  draw() {
    for (const place of this.article.querySelectorAll('[data-chart]')) {
      const draw = CHARTS[place.dataset.chart];
      if (draw) draw(this, place);
    }
    this.pin(this.pinned);
  }
}

const views = [...document.querySelectorAll('article.run')].map(article => new RunView(article));
const together = {lights: new Map(), pinned: null, light() {}, pin() {}};
let current = 0;

function drawAll() {
  tip.hide();
  const all = {quality: drawQuality, dots: drawDots, sidebyside: (place, runs) => drawSideBySide(together, place, runs)};
  for (const place of document.querySelectorAll('#comparison [data-chart]')) all[place.dataset.chart](place, DATA.runs);
  views[current].draw();
}

function choose(number) {
  current = number;
  views.forEach((view, each) => { view.article.hidden = each !== number; });
  for (const link of document.querySelectorAll('[data-link]')) {
    const target = `${link.dataset.link}-${number}`;
    link.setAttribute('href', `#${target}`);
    link.hidden = !document.getElementById(target);
  }
}

const chooser = document.getElementById('chooser');
if (chooser) chooser.addEventListener('change', () => { choose(Number(chooser.value)); drawAll(); });

let theme = 'auto';
function setTheme(name) {
  const button = document.getElementById('theme');
  theme = name;
  document.documentElement.dataset.theme = name;
  button.textContent = capital(name);
  button.setAttribute('aria-label', `Colours: ${THEMES[name]}`);
}
document.getElementById('theme').addEventListener('click', () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(theme) + 1) % names.length]);
});

/* The link of the section that is being read. */
const links = new Map([...document.querySelectorAll('nav a')].map(link => [link.dataset.link || 'comparison', link]));
const watching = new IntersectionObserver(entries => {
  const seen = entries.find(entry => entry.isIntersecting);
  if (!seen) return;
  for (const link of links.values()) link.removeAttribute('aria-current');
  links.get(seen.target.dataset.kind || 'comparison').setAttribute('aria-current', 'true');
}, {rootMargin: '-20% 0px -70% 0px'});
for (const section of document.querySelectorAll('section')) watching.observe(section);

/* Charts are drawn for the width there is; paper has a width of its own. */
let width = document.documentElement.clientWidth;
new ResizeObserver(() => {
  if (document.documentElement.clientWidth === width) return;
  width = document.documentElement.clientWidth;
  drawAll();
}).observe(document.documentElement);
addEventListener('beforeprint', () => { document.body.classList.add('printing'); drawAll(); });
addEventListener('afterprint', () => { document.body.classList.remove('printing'); drawAll(); });
addEventListener('scroll', () => tip.hideIfOld(), {passive: true});

choose(0);
drawAll();
