//! Generates one source file per package: `generator DESCRIPTORS OUT FILE...`. Needs no protoc.

use std::error::Error;
use std::{env, fs};

use prost::Message;
use prost_types::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let (Some(descriptors), Some(out)) = (args.next(), args.next()) else {
        return Err("usage: generator DESCRIPTORS OUT FILE...".into());
    };
    let files: Vec<String> = args.collect();
    let mut set = FileDescriptorSet::decode(fs::read(descriptors)?.as_slice())?;
    set.file.retain(|file| files.iter().any(|name| name == file.name()));
    tonic_prost_build::configure()
        .out_dir(out)
        .build_transport(false)
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .generate_default_stubs(true)
        .compile_fds(set)?;
    Ok(())
}
