//! The public face of the crate: the page for engines in Rust shows a program that runs, and examples name every
//! public item.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::layering::{sources, src, words};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a text file")
}

/// The code blocks of a page in Markdown that run as tests: those of Rust.
fn examples_of_page(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<(bool, String)> = None;
    for line in page.lines() {
        match (&mut block, line.trim_start().strip_prefix("```")) {
            (None, Some(kind)) => {
                let is_run = !["text", "ignore", "sh"].iter().any(|other| kind.contains(other));
                block = Some((is_run, String::new()));
            }
            (Some(_), Some(_)) => {
                let ended = block.take().filter(|(is_run, _)| *is_run);
                found.extend(ended.map(|(_, code)| code));
            }
            (Some((_, code)), None) => {
                code.push_str(line);
                code.push('\n');
            }
            (None, None) => (),
        }
    }
    found
}

/// The examples in the documentation of one source.
fn examples_of_source(text: &str) -> Vec<String> {
    let docs = text.lines().map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).unwrap_or("")
    });
    examples_of_page(&docs.collect::<Vec<_>>().join("\n"))
}

/// Kinds of items that need an example. A constant or another name of a type is explained where it is.
const KINDS: [&str; 5] = ["struct", "enum", "union", "trait", "fn"];

/// The kind and the name of the item that `line` declares for others, if it does.
fn declared(line: &str) -> Option<(&str, &str)> {
    let rest = line.strip_prefix("pub ")?;
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let rest = rest.strip_prefix("const ").filter(|rest| rest.starts_with("fn ")).unwrap_or(rest);
    let mut found = words(rest).into_iter();
    Some((found.next()?, found.next()?))
}

/// The names that the file of a module passes on to everybody, and the modules within that are public.
fn passed_on(text: &str) -> (Vec<String>, Vec<String>) {
    let (mut names, mut modules) = (Vec::new(), Vec::new());
    let mut lines = text.lines().peekable();
    let mut attributes = String::new();
    while let Some(line) = lines.next() {
        if line.starts_with("#[") {
            attributes.push_str(line);
            continue;
        }
        let is_hidden = attributes.contains("doc(hidden)") || attributes.contains("feature = \"python\"");
        attributes.clear();
        if is_hidden {
            continue;
        }
        if let Some(name) = line.strip_prefix("pub mod ") {
            modules.extend(words(name).first().map(|name| (*name).to_owned()));
        } else if line.starts_with("pub use ") {
            let mut import = line.to_owned();
            while !import.contains(';') {
                import.push_str(lines.next().expect("the rest of an import"));
            }
            match import.split_once('{') {
                Some((_, group)) => names.extend(words(group).into_iter().map(str::to_owned)),
                None => names.extend(words(&import).last().map(|name| (*name).to_owned())),
            }
        } else if let Some((kind, name)) = declared(line)
            && KINDS.contains(&kind)
        {
            names.push(name.to_owned());
        }
    }
    (names, modules)
}

/// The public items of the crate, each as `layer::name`.
fn public_items() -> BTreeSet<String> {
    let mut kinds: HashMap<String, HashSet<String>> = HashMap::new();
    for path in sources(&src()) {
        for line in read(&path).lines() {
            if let Some((kind, name)) = declared(line) {
                kinds.entry(name.to_owned()).or_default().insert(kind.to_owned());
            }
        }
    }
    let mut found = BTreeSet::new();
    let (_, layers) = passed_on(&read(&src().join("lib.rs")));
    let mut open: Vec<(String, PathBuf)> =
        layers.into_iter().map(|layer| (layer.clone(), src().join(layer).join("mod.rs"))).collect();
    while let Some((path, file)) = open.pop() {
        let (names, modules) = passed_on(&read(&file));
        // A name that no source declares is one of the ids, which a macro declares.
        let needs = |name: &&String| {
            kinds.get(*name).is_none_or(|kinds| kinds.iter().any(|kind| KINDS.contains(&kind.as_str())))
        };
        found.extend(names.iter().filter(needs).map(|name| format!("{path}::{name}")));
        let folder = file.parent().expect("a folder");
        open.extend(
            modules
                .into_iter()
                .map(|name| (format!("{path}::{name}"), folder.join(name).with_extension("rs"))),
        );
    }
    found
}

#[test]
fn an_example_names_every_public_item() {
    let mut examples: Vec<String> = examples_of_page(&read(&root().join("docs/rust.md")));
    for path in sources(&src()).into_iter().filter(|path| !path.starts_with(src().join("python"))) {
        examples.extend(examples_of_source(&read(&path)));
    }
    let named: HashSet<&str> = examples.iter().flat_map(|code| words(code)).collect();
    let items = public_items();
    let is_missing = |item: &&String| !named.contains(item.rsplit("::").next().expect("a name"));
    let missing: Vec<_> = items.iter().filter(is_missing).collect();
    assert!(items.len() > 350, "only {} public items were found", items.len());
    assert!(missing.is_empty(), "{} of {} are in no example: {missing:#?}", missing.len(), items.len());
}

#[test]
fn the_page_shows_the_engine_of_the_examples() {
    let program = read(&root().join("examples/engine/src/main.rs"));
    let page = read(&root().join("docs/rust.md"));
    assert!(
        examples_of_page(&page).contains(&program),
        "docs/rust.md has another examples/engine/src/main.rs"
    );
    let scheduler = program.split("\nimpl ").nth(1).expect("the scheduler");
    let code = scheduler.lines().filter(|line| !line.trim().is_empty() && !line.trim().starts_with("//"));
    assert!(code.count() <= 70, "the page promises some sixty lines");
}

#[test]
fn what_the_checks_read() {
    let source = "/// A pool.\n///\n/// ```\n/// Pool::new();\n/// ```\n///\n/// ```text\n/// no code\n/// ```\npub struct Pool;";
    assert_eq!(examples_of_source(source), [" Pool::new();\n"]);
    assert_eq!(declared("pub const fn widen() {"), Some(("fn", "widen")));
    assert_eq!(declared("pub unsafe trait Plain {"), Some(("trait", "Plain")));
    assert_eq!(declared("pub const PADDING: u32 = 0;"), Some(("const", "PADDING")));
    assert_eq!(declared("    pub fn method() {"), None);
    let module = "mod one;\npub mod two;\n\npub use one::{\n    First, Second,\n};\n#[doc(hidden)]\npub use one::third;\npub(crate) use one::Fourth;\npub use one::Fifth;\n\npub fn sixth() {";
    let (names, modules) = passed_on(module);
    assert_eq!((names.join(" "), modules.join(" ")), ("First Second Fifth sixth".into(), "two".into()));
}
