// Writes a TypeScript project of 200 modules and a main program, the same each
// time: what the service compiles when it starts.
const fs = require('node:fs');
const path = require('node:path');

const root = process.argv[2];
const count = 200;
fs.mkdirSync(path.join(root, 'src'), { recursive: true });
fs.writeFileSync(path.join(root, 'tsconfig.json'), JSON.stringify({
	compilerOptions: { target: 'es2020', module: 'commonjs', strict: true, lib: ['es2020'], types: [], rootDir: 'src', outDir: 'out' },
	include: ['src'],
}));

function moduleOf(i) {
	const uses = [i - 1, Math.floor(i / 2), Math.floor(i / 3)].filter((j, k, all) => j >= 0 && j < i && all.indexOf(j) === k);
	const imports = uses.map((j) => `import { View${j}, render${j} } from './view${j}';`).join('\n');
	return `${imports}

export interface View${i}<T extends { id: number } = { id: number }> {
	readonly kind: 'view${i}';
	readonly item: T;
	readonly children: ReadonlyArray<${['{ kind: string }', ...uses.map((j) => `View${j}`)].join(' | ')}>;
	readonly handlers: Partial<Record<keyof T & string, (value: T[keyof T]) => void>>;
}

type Fields${i}<T> = { [K in keyof T as \`get\${Capitalize<K & string>}\`]: () => T[K] };

export class Model${i}<T extends { id: number; title: string }> {
	private readonly rows = new Map<number, T>();
	add(row: T): this {
		this.rows.set(row.id, row);
		return this;
	}
	fields(id: number): Fields${i}<T> | undefined {
		const row = this.rows.get(id);
		if (row === undefined) return undefined;
		const out: Record<string, () => unknown> = {};
		for (const key of Object.keys(row) as (keyof T & string)[]) {
			out['get' + key[0].toUpperCase() + key.slice(1)] = () => row[key];
		}
		return out as unknown as Fields${i}<T>;
	}
	select<R>(f: (row: T) => R): R[] {
		return Array.from(this.rows.values(), f).filter((r, k, all) => all.indexOf(r) === k);
	}
}

export function make${i}(id: number): View${i}<{ id: number; title: string }> {
	const model = new Model${i}<{ id: number; title: string }>().add({ id, title: 'view ${i}' });
	const [item] = model.select((row) => row);
	return { kind: 'view${i}', item, children: [], handlers: { title: (v) => void String(v) } };
}

export function render${i}(depth: number): string {
	const view = make${i}(depth);
	const inner = depth > 0 ? [${uses.map((j) => `render${j}(depth - 1)`).join(', ')}] : [];
	return \`<div class="\${view.kind}" id="\${view.item.id}">\${view.item.title}\${inner.join('')}</div>\`;
}
`;
}

for (let i = 0; i < count; i++) fs.writeFileSync(path.join(root, 'src', `view${i}.ts`), moduleOf(i));
fs.writeFileSync(path.join(root, 'src', 'main.ts'), `import { render${count - 1} } from './view${count - 1}';

declare function require(name: string): any;
const page: string = '<!doctype html><title>web</title>' + render${count - 1}(2);
require('node:http').createServer((req: unknown, res: { end(s: string): void }) => res.end(page)).listen(3000, '0.0.0.0');
`);
