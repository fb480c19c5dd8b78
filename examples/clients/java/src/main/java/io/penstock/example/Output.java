package io.penstock.example;

import java.io.IOException;

/** Standard output that throws an exception if writing fails. */
final class Output {
  private Output() {}

  /** Writes the text, and flushes the output. */
  static void print(String text) throws IOException {
    System.out.print(text);
    if (System.out.checkError()) {
      throw new IOException("nobody reads the output");
    }
  }
}
