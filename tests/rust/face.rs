//! The public face of the crate: the page for engines in Rust shows a program that runs.

use std::fs;
use std::path::Path;

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
