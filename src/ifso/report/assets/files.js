/* Buttons that copy, and that save what is on the page as a file. */
function download(name, blob) {
  const link = html('a', {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* A text that begins like a formula is none when a spreadsheet opens the file. */
function csvCell(cell) {
  const words = cell.dataset.raw || (cell.textContent.trim() === '–' ? '' : cell.textContent.trim());
  const safe = /^[=+\-@\t]/.test(words) && Number.isNaN(Number(words)) ? `'${words}` : words;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

const csv = table => [...table.rows].map(row => `${[...row.cells].map(csvCell).join(',')}\r\n`).join('');

async function copy(button, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);
    if (!document.execCommand('copy')) return;
    getSelection().removeAllRanges();
  }
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 2000);
}

for (const button of document.querySelectorAll('[data-copy]')) {
  button.hidden = false;
  button.addEventListener('click', () => copy(button, button.parentElement.querySelector('code')));
}

for (const button of document.querySelectorAll('[data-csv]')) {
  button.hidden = false;
  const table = button.parentElement.nextElementSibling.querySelector('table');
  button.addEventListener('click', () => download(button.dataset.csv, new Blob([csv(table)], {type: 'text/csv'})));
}

for (const button of document.querySelectorAll('[data-recipe]')) {
  const {recipe} = DATA.runs[Number(button.closest('article').dataset.run)];
  if (!recipe) continue;
  button.hidden = false;
  button.addEventListener('click', async () => {
    const stream = new Blob([bytes(recipe)]).stream().pipeThrough(new DecompressionStream('deflate'));
    download('recipe.json', await new Response(stream).blob());
  });
}
